"""`make export` of drafters without training: vLLM's config, and where vLLM would draft otherwise."""

import json

import pytest
from tiny import call, write_recipe, write_target

from drafters.export.untrained import serving_config
from eval.ship import COMMAND


def test_configs_by_hand():
    """The keys are vLLM's (formats.md, section 6)."""
    config, apart = serving_config("lookup", {"longest": 5, "shortest": 2, "match": "first"}, 4)
    assert apart == [] and config == {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    assert "first occurrence" in serving_config("lookup", {}, 4)[1][0]
    config, apart = serving_config("suffix", {"longest": 20, "factor": 0.5, "min_probability": 0.2}, 8)
    assert config == {
        "method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_tree_depth": 28,
        "suffix_decoding_max_spec_factor": 0.5, "suffix_decoding_min_token_prob": 0.2}
    assert ["arctic-inference" in apart[0], "10,000 requests" in apart[1], "very same prompt" in apart[2]] == [True] * 3
    assert serving_config("suffix", {"longest": 4, "factor": 0.5}, 8)[0]["suffix_decoding_max_tree_depth"] == 6


@pytest.mark.parametrize("options", [{"grow": False}, {"corpus_tokens": 0}])
def test_a_corpus_that_does_not_grow_is_none_in_vllm(options):
    config, apart = serving_config("suffix", options, 8)
    assert config["suffix_decoding_max_cached_requests"] == 0 and len(apart) == 1


def test_what_vllm_cannot_do_is_said():
    _, apart = serving_config("suffix", {"shortest": 3, "outputs": "x.jsonl", "repeats": True}, 8)
    assert len(apart) == 4 and "without earlier outputs" in apart[2] and "not of 3 or more" in apart[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


def test_the_config_is_exported(tmp_path, model, capsys):
    recipe = write_recipe(tmp_path / "r.yaml", model, drafter={"kind": "suffix", "options": {}},
                          eval={"draft_length": 8})
    assert call(COMMAND, recipe) == 0
    out = tmp_path / "runs" / "tiny" / "export" / "vllm"
    config = json.loads((out / "speculative-config.json").read_text())
    assert config == serving_config("suffix", {}, 8)[0]
    text = (out / "SERVE.md").read_text()
    assert json.dumps(config) in text and "--speculative-config" in text and str(model) not in text
    assert "vLLM drafts by this config" in capsys.readouterr().out


@pytest.mark.parametrize("drafter,flags,message", [
    ({"kind": "suffix"}, ["--eval.tree.depth", "3"], "vLLM serves chains of this drafter"),
    ({"kind": "lookup"}, ["--eval.choose", "chain"], "vLLM serves chains of this drafter"),
    ({"kind": "layer_cut"}, [], "drafter.kind = layer_cut: there is nothing to train or export"),
    ({"kind": "fallback", "options": {"drafter": {"kind": "lookup"}}}, [],
     "drafter.kind = fallback: the drafters that it holds are trained and exported by recipes of their own"),
])
def test_what_is_not_served_is_named(tmp_path, model, capsys, drafter, flags, message):
    recipe = write_recipe(tmp_path / "r.yaml", model, drafter={"options": {}, **drafter})
    assert call(COMMAND, recipe, *flags) == 2
    assert message in capsys.readouterr().err
