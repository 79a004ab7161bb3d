"""`make publish`: what is refused, what is written, and the upload against a server on loopback, faults included."""

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from fake_hub_uploads import TOKEN, FakeUploads
from huggingface_hub import ModelCard, constants
from huggingface_hub.utils import _http, disable_progress_bars, enable_progress_bars
from tiny import call
from tiny_run import tiny_run

from drafters.tree import DynamicTree
from eval import publish, ship
from eval import run as eval_run
from eval.licences import TargetTerms, data_terms, notices, problems, target_terms
from eval.plans import described
from eval.public import SECRETS
from eval.upload import Uploader
from recipes.errors import ConfigError, RunError
from recipes.files import sha256_file
from recipes.schema import Prompts, PromptSource

ROOT = Path(__file__).resolve().parent.parent
TERMS = ["--base_model", "org/target", "--target_licence", "apache-2.0"]
PUBLISH = ["--repo", "org/drafter", *TERMS, "--despite-verdict"]
SECRET = "a-prompt-that-nobody-else-may-read"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run that was exported in both layouts and evaluated, with a token in the environment."""
    made = tiny_run(tmp_path_factory.mktemp("publish"))
    values = yaml.safe_load(made.recipe.read_text())
    values["prompts"] = {"sources": [{"kind": "synthesis", "count": 3, "starts": [SECRET]}]}
    made.recipe.write_text(yaml.safe_dump(values))
    assert call(ship.COMMAND, made.recipe, "--export.formats", "[native, speculators]") == 0
    assert call(eval_run.COMMAND, made.recipe) == 0
    return made


@pytest.fixture(autouse=True)
def hub_settings(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(Uploader.__init__, "__defaults__", (False, lambda seconds: None))
    disable_progress_bars()
    yield
    enable_progress_bars()


def staged(base) -> Path:
    return base.run / "publish" / "drafter"


def refused(base, capsys, *flags) -> str:
    assert call(publish.COMMAND, base.recipe, *PUBLISH, "--dry-run", *flags) in (1, 2)
    return capsys.readouterr().err


@pytest.mark.parametrize("layout", ["native", "speculators"])
def test_dry_run_writes_the_exact_folder(base, capsys, layout):
    """A dry run asks no server; the upload then sends exactly these files. Nothing in them names a prompt, a folder
    of this machine or a token."""
    flags = [*PUBLISH, "--format", layout]
    assert call(publish.COMMAND, base.recipe, *flags, "--dry-run") == 0
    assert "nothing was uploaded" in capsys.readouterr().out
    files = {p.name: p.read_bytes() for p in staged(base).iterdir()}
    with FakeUploads() as hub:
        assert call(publish.COMMAND, base.recipe, *flags, "--endpoint", hub.url) == 0
        assert hub.repos["org/drafter"]["files"] == files and hub.repos["org/drafter"]["private"] is True
        assert len(hub.repos["org/drafter"]["commits"]) == 1
    out, err = capsys.readouterr()
    assert TOKEN not in out + err and "published (private): " in out
    assert set(files) >= {"README.md", "model.safetensors", "config.json", "provenance.json", "evaluation.json",
                          "recipe.yaml", "SERVE.md", "serve.sh"}
    for name, content in files.items():
        if name != "model.safetensors":
            for word in (SECRET, str(base.run.parent.parent), TOKEN, "say abc", str(Path.home()) + "/"):
                assert word.encode() not in content, (name, word)
    assert sha256_file(base.run / "export" / layout / "model.safetensors") == sha256_file(
        staged(base) / "model.safetensors")


def test_the_card(base):
    """Base model, licence, data, acceptance table, commands and limits, and the metrics as a model-index."""
    assert call(publish.COMMAND, base.recipe, *PUBLISH, "--dry-run") == 0
    report = json.loads((base.run / "eval" / "report.json").read_text())
    card = ModelCard.load(staged(base) / "README.md")
    assert card.data.base_model == "org/target" and card.data.license == "apache-2.0"
    values = {r.metric_type: r.metric_value for r in card.data.eval_results}
    assert values["mean_acceptance_length"] == round(report["total"]["acceptance"]["mean_length"], 4)
    assert set(values) == {"mean_acceptance_length", "acceptance_rate", "tokens_per_target_pass", "speedup"}
    text = card.content
    first = 100 * report["total"]["acceptance"]["per_position"][0]
    for part in ("| position 3 |", f"{first:.1f} %", "vllm serve org/target", "prompts written by the target itself",
                 "Prompt texts are not published", "## Limits", "Labelled for 512 positions", "Verdict: do not deploy",
                 '"model": "org/drafter"',
                 "--speculative-draft-model-path org/drafter"):
        assert part in text, part
    assert json.loads((staged(base) / "config.json").read_text())["drafthouse"]["target"]["model"] == "org/target"


def test_a_card_says_what_was_drafted(base):
    """A tree's acceptance is no chain's; answers that came with the prompts are not the target's own."""
    report = json.loads((base.run / "eval" / "report.json").read_text())
    facts = publish.CardFacts("o/d", "mit", TargetTerms("o/t", "mit"), [], [], "native", False, "# x\n\n", "a: 1")
    assert "chains of 3, greedy" in publish.model_card(facts, report)
    assert "answers and hidden states: the target's own" in publish.model_card(facts, report)
    report["settings"]["plan"] = described(DynamicTree(2, 3, 9))
    text = publish.model_card(replace(facts, answers_kept=True), report)
    assert "chains of" not in text and "dynamic trees of depth 2 and 9 tokens, greedy" in text
    assert "plain chains, whose acceptance is another" in text
    assert "answers: those that came with the prompts" in text and "answers and hidden" not in text


def test_prompts_only_when_asked(base):
    assert call(publish.COMMAND, base.recipe, *PUBLISH, "--dry-run", "--with-prompts") == 0
    assert "say abc" in (staged(base) / "evaluation_prompts.jsonl").read_text()
    assert SECRET in (staged(base) / "recipe.yaml").read_text()


def test_names_cannot_add_markup(base):
    """A prompt kind, taken from a file, stays text in the card."""
    report = json.loads((base.run / "eval" / "report.json").read_text())
    report["sets"] = {"<img src=x onerror=alert(1)>|`x`\n# title [a](http://b)": next(iter(report["sets"].values()))}
    facts = publish.CardFacts("o/d", "mit", TargetTerms("o/t", "mit"), [], [], "native", False, "# x\n\n",
                              "a: </details>")
    text = publish.model_card(facts, report)
    assert "<img" not in text and "\n# title" not in text and "[a](" not in text.replace("\\[a](", "")
    assert text.count("</details>") == 1


@pytest.mark.parametrize("part, value, message", [
    (("total", "lossless", "greedy", "mismatches"), 1, "1 of 4 greedy answers differ"),
    (("total", "lossless", "greedy", "near_ties"), 3, "3 near-ties"),
    (("total", "lossless", "greedy", "prompts"), 0, "no greedy answer was compared"),
    (("total", "lossless", "sampling", "p_value"), 1e-9, "do not follow the target's distribution"),
    (("target", "fingerprint", "weights"), "other", "the evaluation was made with another target (weights)"),
    (("settings", "key"), "other", "is not of this checkpoint")])
def test_the_gate(base, capsys, part, value, message):
    """Cases 12, 36, 50, 59: a broken gate, another target's evaluation, or one of other settings."""
    path = base.run / "eval" / "report.json"
    whole = path.read_text()
    report = json.loads(whole)
    node = report
    for key in part[:-1]:
        node = node[key]
    node[part[-1]] = value
    path.write_text(json.dumps(report))
    try:
        assert message in refused(base, capsys)
    finally:
        path.write_text(whole)


def test_verdict_check_and_changed_files(base, capsys):
    """A negative verdict needs a word; an export that changed, or that no second reader has read, is refused."""
    assert call(publish.COMMAND, base.recipe, "--repo", "org/drafter", *TERMS, "--dry-run") == 1
    assert "verdict: do not deploy" in capsys.readouterr().err
    serve = base.run / "export" / "native" / "SERVE.md"
    whole = serve.read_bytes()
    serve.write_bytes(whole + b"\n")
    assert "not what `make export` checked last" in refused(base, capsys)
    serve.write_bytes(whole)
    proof = base.run / "export" / "native-check.json"
    whole = proof.read_text()
    stored = json.loads(whole)
    proof.write_text(json.dumps({k: v for k, v in stored.items() if k != "reader"}))
    assert "no second reader has decoded" in refused(base, capsys)
    proof.write_text(whole)
    weights = base.model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-4] + b"abcd")
    assert "the export was made with another target (weights)" in refused(base, capsys)
    weights.write_bytes(content)


@pytest.mark.parametrize("flags, message", [
    (["--repo", "drafter"], "must be org/name"), (["--repo", "org/../x"], "must be org/name"),
    (["--repo", "org/$(touch x)"], "must be org/name"), (["--endpoint", "http://example.com"], "must be https://HOST"),
    (["--endpoint", "https://user:pw@example.com"], "must be https://HOST"),
    (["--target_licence", "llama3.1"], "asks that the name begins with Llama"),
    (["--target_licence", "llama3.1", "--licence", "mit"], "stays under it"),
    (["--target_licence", "homemade"], "its terms are not in"),
    (["--prompts.sources", "[{kind: jsonl, path: /data/x.jsonl}]"], "--data_licence"),
    (["--prompts.sources", "[{kind: jsonl, path: /data/x.jsonl}]", "--data_licence", "cc-by-nc-4.0"],
     "allows no commercial use")])
def test_names_and_terms(base, capsys, flags, message):
    """Licence and naming terms of target and data are checked, not assumed."""
    assert message in refused(base, capsys, *flags)


def test_terms_are_stated():
    """A target out of a GGUF says so; a folder states its licence by its card; terms that have to be shown are."""
    terms = target_terms("embedded:smollm2-135m", "", "", "https://huggingface.co", None)
    assert terms.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct" and terms.licence == "apache-2.0"
    assert "dequantised from the Q4_1 GGUF" in terms.origin
    built = TargetTerms("meta-llama/Llama-3.1-8B-Instruct", "llama3.1")
    assert not list(problems("org/Llama-3.1-8B-drafter", "llama3.1", built, [("x", "mit")]))
    assert notices(built, []) == ["The target, meta-llama/Llama-3.1-8B-Instruct: Built with Llama"]
    own = Prompts(sources=[PromptSource(kind="jsonl", path=str(ROOT / "recipes" / "prompts.jsonl"))])
    assert data_terms(own, built, "") == [("prompts of this project (prompts.jsonl)", "apache-2.0")]
    with pytest.raises(ConfigError, match="--data_licence"):
        data_terms(Prompts(sources=[PromptSource(kind="hub", name="o/d")]), built, "")


def test_a_folder_states_its_licence(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# x\n")
    assert target_terms(str(tmp_path), "o/t", "", "", None).licence == "mit"
    with pytest.raises(ConfigError, match="README.md says mit"):
        target_terms(str(tmp_path), "o/t", "apache-2.0", "", None)
    with pytest.raises(ConfigError, match="--base_model"):
        target_terms(str(tmp_path), "", "", "", None)


def test_a_secret_in_the_recipe_is_not_published(base, capsys):
    sources = "[{kind: synthesis, count: 3, starts: [hf_abcdefghijklmnopqrstuv]}]"
    message = refused(base, capsys, "--prompts.sources", sources, "--with-prompts")
    assert "README.md holds what looks like a key" in message and "abcdefghij" not in message


@pytest.mark.parametrize("text, key", [
    ("sk-abcdefghijklmnopqrstuv", True), ("key=sk-abcdefghijklmnopqrstuv", True), ("ghp_" + "a" * 36, True),
    ("github_pat_" + "a1_" * 8, True), ("multitask-drafter-for-long-contexts", False),
    ("disk-abcdefghijklmnopqrstuvwxyz", False), ("the github_path of it", False)])
def test_what_looks_like_a_key(text, key):
    """Keys by their form, and no words that only end like the beginning of one."""
    assert bool(SECRETS.search(text)) is key


FAULTS = {
    "preupload fails": ({"POST /api/models/org/drafter/preupload": [500, 503]}, 0),
    "storage fails": ({"PUT /storage": [500, 502]}, 0),
    "storage is cut": ({"PUT /storage": ["cut"]}, 0),
    "commit fails": ({"/commit/": [500, 503]}, 0),
    "commit is cut": ({"/commit/": ["cut"]}, 0),
    "commit's answer is lost": ({"/commit/": ["lost"]}, 0),
    "commit fails for good": ({"/commit/": [500] * 9}, 1),
    "create is forbidden": ({"/repos/create": [403]}, 2),
    "commit is forbidden": ({"/commit/": [403]}, 2),
    "commit is refused": ({"/commit/": [400]}, 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(base, capsys, fault):
    """Every fault that passes is passed, with one commit; one that stays is a line without the token, and a repeated
    command goes on: no object is sent twice."""
    faults, code = FAULTS[fault]
    with FakeUploads() as hub:
        hub.faults = {part: list(todo) for part, todo in faults.items()}
        assert call(publish.COMMAND, base.recipe, *PUBLISH, "--endpoint", hub.url) == code
        out, err = capsys.readouterr()
        assert TOKEN not in out + err and "Traceback" not in err
        sent = hub.count("PUT", "/storage/")
        if code:
            assert err.strip().splitlines()[-1].startswith("make publish: error: REPO=org/drafter: ")
            hub.faults = {}
            assert call(publish.COMMAND, base.recipe, *PUBLISH, "--endpoint", hub.url) == 0
            assert hub.count("PUT", "/storage/") == max(sent, 1)
        assert len(hub.repos["org/drafter"]["commits"]) == 1
        assert set(hub.repos["org/drafter"]["files"]) == {p.name for p in staged(base).iterdir()}


def test_what_an_earlier_publication_left(base, capsys):
    """Prompts that were published once are gone with the next commit, which leaves what is not this project's; a
    repository that was private stays so, and is not called published without that word."""
    with FakeUploads() as hub:
        flags = [*PUBLISH, "--endpoint", hub.url]
        assert call(publish.COMMAND, base.recipe, *flags, "--with-prompts") == 0
        files = hub.repos["org/drafter"]["files"]
        assert "evaluation_prompts.jsonl" in files
        files["NOTES.md"] = b"mine"
        assert call(publish.COMMAND, base.recipe, *flags) == 0
        assert set(files) == {p.name for p in staged(base).iterdir()} | {"NOTES.md"}
        assert "evaluation_prompts.jsonl" not in files and len(hub.repos["org/drafter"]["commits"]) == 2
        capsys.readouterr()
        assert call(publish.COMMAND, base.recipe, *flags, "--public") == 0
        out = capsys.readouterr().out
        assert "published (private): " in out and "was private before and stays so" in out


def test_wrong_token_and_public_repository(base, capsys):
    """A wrong token is one line that does not show it; a repository that is public already is not published to by
    mistake, nor one with other weights."""
    with FakeUploads(token="hf_" + "r" * 34) as hub:
        assert call(publish.COMMAND, base.recipe, *PUBLISH, "--endpoint", hub.url) == 2
        out, err = capsys.readouterr()
        assert "refuses the token (401)" in err and TOKEN not in out + err and not hub.repos
        hub.token = TOKEN
        hub.repos["org/drafter"] = {"private": False, "files": {}, "commits": []}
        assert call(publish.COMMAND, base.recipe, *PUBLISH, "--endpoint", hub.url) == 2
        assert "is public; pass --public" in capsys.readouterr().err
        hub.repos["org/drafter"]["files"]["pytorch_model.bin"] = b"x"
        assert call(publish.COMMAND, base.recipe, *PUBLISH, "--endpoint", hub.url, "--public") == 1
        assert "holds pytorch_model.bin, which an engine may load" in capsys.readouterr().err
        del hub.repos["org/drafter"]["files"]["pytorch_model.bin"]
        assert call(publish.COMMAND, base.recipe, *PUBLISH, "--endpoint", hub.url, "--public") == 0


def test_without_a_token(base, capsys, monkeypatch):
    monkeypatch.setattr(publish, "get_token", lambda: None)
    assert call(publish.COMMAND, base.recipe, *PUBLISH) == 2
    assert "no Hub token" in capsys.readouterr().err


def test_errors_that_stay_are_named():
    """What a request raises becomes one line: offline mode, and an answer that is no Hub's."""
    uploader = Uploader("o/d", TOKEN, "http://127.0.0.1:9")
    with pytest.raises(RunError, match="not the Hub's"):
        uploader.call(lambda: (_ for _ in ()).throw(ValueError(f"bad answer to {TOKEN}")))
    with pytest.raises(RunError, match="the connection failed") as error:
        uploader.call(lambda: uploader.api.model_info("o/d"))
    assert TOKEN not in str(error.value)


def test_make_passes_the_name_as_it_is(tmp_path):
    """REPO reaches the program as one argument, whatever is in it."""
    done = subprocess.run(["make", "-n", "publish", "REPO=org/$(touch x); rm -rf /"], cwd=ROOT, capture_output=True,
                          text=True, check=True, env=os.environ)
    line = next(line for line in done.stdout.splitlines() if "eval.publish" in line)
    assert re.search(r'--repo "\$\{?REPO\}?"', line) and "rm -rf" not in line
