"""What a run starts from: a drafter of every layout computes what it did before, and what does not fit is named."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from published import IDS, D, in_layers, maps, native, plain, speculators, weights, write
from safetensors.torch import load_file, save_file
from tiny import LAYERS, H, L, V, call, conversations, load_target, write_recipe, write_target, write_traces

from data.store import TraceReader
from drafters import checkpoint, source
from drafters.initial import begin, head_rows
from eval.plots import plot_curve
from eval.replay import replay
from recipes.errors import ConfigError
from recipes.schema import Drafter
from train import checkpoints
from train.run import COMMAND

COUNTS = {id: 100 - id for id in range(4, 30)}
EVERYTHING = {"tap_norms": True, "feedback": "post_norm", "norm_before_residual": True, "num_layers": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A target folder, the target, traces of a run and its recipe."""
    folder = tmp_path_factory.mktemp("initial")
    model = write_target(folder / "model")
    return SimpleNamespace(model=model, target=load_target(model, "float32", LAYERS), folder=folder)


def section(folder, vocabulary: str = "keep", **options) -> Drafter:
    return Drafter(init_from=str(folder), vocabulary=vocabulary, options=options)


def start(base, folder, vocabulary: str = "keep", **options):
    return begin(section(folder, vocabulary, **options), base.target, COUNTS, 0)


def write_own(folder, base, **options):
    """The drafter as a checkpoint of this project."""
    shape = {"hidden_size": H, "target_hidden_size": H, "intermediate_size": 48, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "hidden_act": "silu", "vocab_size": V,
             "draft_vocab_size": D, "max_position_embeddings": 128, "target_layers": L,
             "rope_parameters": {"rope_theta": 16.0, "rope_type": "default"}}
    flags = {"tap_norms": False, "feedback": "pre_norm", "norm_before_residual": False, **options}
    meta = {"kind": "eagle3", "options": {"draft_vocab_size": D, "intermediate_size": 48, **flags}, "shape": shape,
            "layers": LAYERS, "target": {"model": "org/target", "fingerprint": base.target.fingerprint()}}
    folder.mkdir()
    checkpoint.save(folder, weights(tap_norms=flags["tap_norms"], layers=flags.get("num_layers", 1)) | maps(), meta)
    return folder


def written(layout: str, folder, base, everything: bool):
    """(folder in a layout, options that the recipe has to state) of the drafter with no variant, or with all."""
    layers = 2 if everything else 1
    tensors = weights(tap_norms=everything, layers=layers)
    embedding = {"embed_tokens.weight": base.target.embedding}
    if layout == "own":
        return write_own(folder, base, **(EVERYTHING if everything else {})), {}
    if layout == "speculators":
        flags = {"fc_norm": everything, "norm_output": everything, "norm_before_residual": everything}
        config = speculators({"num_hidden_layers": layers}, **flags)
        return write(folder, config, in_layers(tensors) | embedding | maps()), {}
    flags = {"fc_norm": True, "norm_output": True, "norm_before_residual": True} if everything else {}
    flags["num_hidden_layers"] = layers
    stated = {"feedback": "post_norm"} if everything else {}
    if layout == "native, pytorch_model.bin":
        halves = {n: t.bfloat16() for n, t in embedding.items()}  # an embedding in fewer bits is still the target's
        return write(folder, native(**flags), in_layers(tensors, "model.") | halves | maps(), binary=True), stated
    return write(folder, native(**flags), tensors | maps()), stated


@pytest.mark.parametrize("everything", [False, True], ids=["plain", "every variant"])
@pytest.mark.parametrize("layout", ["native", "native, pytorch_model.bin", "speculators", "own"])
@torch.no_grad()
def test_logits_after_import_are_those_of_the_source(base, tmp_path, layout, everything):
    """Case 13: the distributions that the decoding loop gets are those of the drafter's maths written out over the
    weights that went into the file, in every layout, with and without the variants."""
    folder, stated = written(layout, tmp_path / "source", base, everything)
    drafter = start(base, folder, **stated).drafter.double().eval()
    tensors = weights(tap_norms=everything, layers=2 if everything else 1)
    slow = plain(tensors, base.target.embedding, **(EVERYTHING if everything else {}))
    g = torch.Generator().manual_seed(1)
    ids, taps = torch.randint(0, V, (8,), generator=g).tolist(), torch.randn(7, 3 * H, generator=g).double()
    session = drafter.session(1, 16)
    session.observe(taps[None], torch.tensor([ids[1:]]), torch.arange(7)[None], torch.tensor([6]))
    drafted = session.propose(3, lambda q: q.argmax(-1))
    following = [ids[7], *drafted.tokens[0, :2].tolist()]
    for q, output in zip(drafted.q[0], slow.chain(ids, taps, 6, following), strict=True):
        torch.testing.assert_close(q[IDS].double(), slow.logits(output).softmax(-1), rtol=1e-4, atol=1e-6)
    assert float(drafted.q.max()) > 2 / D  # no uniform distribution, which anything would equal


def test_full_vocabulary_without_a_head_takes_the_targets(base, tmp_path):
    """A full-vocabulary folder without lm_head is served with the target's head, so it starts with it; where the two
    are tied, with the embedding (case 58)."""
    headless = {n: t for n, t in weights().items() if n != "lm_head.weight"}
    for tied, table in ((False, base.target.head_weight), (True, base.target.embedding)):
        config = native(draft_vocab_size=None, tie_word_embeddings=tied)
        drafter = start(base, write(tmp_path / str(tied), config, headless)).drafter
        assert torch.equal(drafter.lm_head.weight, table) and bool(drafter.t2d.all())


def test_rows_of_tokens_that_stay_are_kept():
    """By hand: tokens 1, 4, 7 of before; 1 and 7 stay, 2 and 5 are new and take the target's rows 2 and 5."""
    head, fresh = torch.tensor([[10.0], [40.0], [70.0]]), torch.arange(9.0)[:, None]
    rows = head_rows(head.bfloat16(), torch.tensor([1, 4, 7]), torch.tensor([1, 2, 5, 7]), fresh)
    assert rows.tolist() == [[10.0], [2.0], [5.0], [70.0]] and rows.dtype == torch.float32
    assert head_rows(head, torch.tensor([7, 1, 4]), torch.tensor([1, 4, 7]), fresh)[:, 0].tolist() == [40.0, 70.0, 10.0]


@pytest.mark.parametrize("size", [12, 8, 32])
def test_vocabulary_rebuilt_from_the_new_data(base, tmp_path, size):
    """The new data's tokens by count after the special ones, then the source's, lowest first; whatever the size, rows
    of tokens that stay are the source's and the others the target's (case 57)."""
    folder = write(tmp_path / "source", native(), weights() | maps())
    begun = start(base, folder, "rebuild", draft_vocab_size=size)
    counted = {0, 1, 2, *range(4, 30)}  # special tokens, and every token of COUNTS
    wanted = sorted(counted | {3, 30, 33})[:32] if size == 32 else sorted(counted)[:size]
    drafter, kept = begun.drafter, [id for id in wanted if id in IDS]
    assert drafter.draft_ids.tolist() == wanted and begun.options.draft_vocab_size == size and kept
    for row, id in enumerate(wanted):
        source_row = weights()["lm_head.weight"][IDS.index(id)] if id in IDS else base.target.head_weight[id]
        assert torch.equal(drafter.lm_head.weight[row], source_row)
    assert torch.equal(drafter.teacher_head, base.target.head_weight[wanted])
    assert f"{size} draft tokens, {size - len(kept)} of them new" in begun.notes[0]
    assert begun.origin["vocabulary"] == "rebuild"
    default = start(base, folder, "rebuild").options
    assert default.draft_vocab_size == D, "the source's size where the recipe names none"


def test_ids_in_another_order_are_sorted_with_their_rows(base, tmp_path):
    """Engines and the export want ascending ids: the rows go with them."""
    order = torch.tensor([5, 0, 11, 3, 1, 2, 4, 6, 7, 8, 9, 10])
    ids = torch.tensor(IDS)[order]
    tensors = weights() | {"lm_head.weight": weights()["lm_head.weight"][order],
                           "d2t": ids - torch.arange(D), "t2d": maps()["t2d"]}
    drafter = start(base, write(tmp_path / "source", native(), tensors)).drafter
    assert drafter.draft_ids.tolist() == IDS and torch.equal(drafter.lm_head.weight, weights()["lm_head.weight"])


def test_options_come_from_the_checkpoint_and_training_from_the_recipe(base, tmp_path):
    """Sizes and variants are the source's; depth and noise are the recipe's; the longest position is the target's."""
    folder = written("speculators", tmp_path / "source", base, True)[0]
    options = start(base, folder, depth=5, hidden_noise=0.1, tap_norms=True, draft_vocab_size=D).options
    assert (options.draft_vocab_size, options.intermediate_size) == (D, 48) and options.depth == 5
    assert (options.tap_norms, options.feedback, options.norm_before_residual) == (True, "post_norm", True)
    assert options.num_layers == 2
    drafter = start(base, folder).drafter
    assert drafter.shape.max_position_embeddings == 512 and drafter.shape.target_layers == L
    assert drafter.meta()["options"]["feedback"] == "post_norm" and drafter.tapped == LAYERS


@pytest.mark.parametrize("options, message", [
    ({"tap_norms": True}, "drafter.options.tap_norms = True, but .*source has False"),
    ({"feedback": "post_norm"}, "drafter.options.feedback = 'post_norm', but .*source has 'pre_norm'"),
    ({"norm_before_residual": True}, "drafter.options.norm_before_residual = True"),
    ({"draft_vocab_size": 16}, "drafter.options.draft_vocab_size = 16, but .*source has 12.*vocabulary: rebuild"),
    ({"intermediate_size": 64}, "drafter.options.intermediate_size = 64, but .*source has 48"),
    ({"intermediate_size": 0}, "drafter.options.intermediate_size = 0, but .*source has 48"),
    ({"num_layers": 2}, "drafter.options.num_layers = 2, but .*source has 1"),
    ({"start": "random"}, "drafter.options.start = random.*drafter.init_from"),
    ({"depht": 3}, "depht"),
])
def test_recipe_that_contradicts_the_checkpoint(base, tmp_path, options, message):
    """A recipe that asks for another drafter than the source is an error that names both, never one of them."""
    folder = write(tmp_path / "source", native(), weights() | maps())
    with pytest.raises(ConfigError, match=message):
        start(base, folder, **options)


def test_settings_left_open_are_asked_for(base, tmp_path):
    """Case 47: where engines read a folder differently, the recipe says what is meant; without it nothing starts."""
    folder = write(tmp_path / "native", native(norm_output=True), weights() | maps())
    with pytest.raises(ConfigError, match="native: norm_output = True .*set drafter.options.feedback"):
        start(base, folder)
    assert start(base, folder, feedback="pre_norm").options.feedback == "pre_norm"
    folder = write(tmp_path / "speculators", speculators(norm_before_residual=None), weights() | maps())
    with pytest.raises(ConfigError, match="set drafter.options.norm_before_residual"):
        start(base, folder)
    assert start(base, folder, norm_before_residual=True).drafter.options.norm_before_residual


FOREIGN = {
    "vocabulary": (native(vocab_size=80), {"t2d": torch.cat([maps()["t2d"], torch.zeros(16).bool()])},
                   r"config.json: vocab_size = 80, but target.model = .* has 64"),
    "target width": (native(target_hidden_size=48), {"fc.weight": torch.ones(H, 144)},
                     "config.json: target_hidden_size = 48, but .* has 32"),
    "taps": (native(eagle_aux_hidden_state_layer_ids=[1, 2, 4]), {},
             r"layer_ids = \[1, 2, 4\], but the target is tapped at \[1, 2, 3\]; set trace.layers: \[1, 2, 4\]"),
    "taps, output ids": (native(eagle_aux_hidden_state_layer_ids=None,
                                eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}), {},
                         r"eagle_config.eagle_aux_hidden_state_layer_ids = \[2, 3, 4\], but the target is tapped"),
    "too deep": (native(eagle_aux_hidden_state_layer_ids=[2, 3, 9]), {}, r"\[2, 3, 9\], but .* has 6 layers"),
    "no taps, shallow": (native(eagle_aux_hidden_state_layer_ids=None), {}, "is absent, and .* a target of 6 layers"),
    "embedding": (native(), {"embed_tokens.weight": torch.ones(V, H)}, "embed_tokens.weight is not the embedding"),
}


@pytest.mark.parametrize("config, change, message", FOREIGN.values(), ids=FOREIGN)
def test_drafter_of_another_target(base, tmp_path, config, change, message):
    """Cases 01, 03, 04, 36: every mismatch with the target names file, key and both values."""
    folder = write(tmp_path / "source", config, weights() | maps() | change)
    with pytest.raises(ConfigError, match=message) as error:
        start(base, folder)
    assert str(folder) in str(error.value)


def test_drafter_of_another_width(base, tmp_path):
    """A drafter narrower than its target has an embedding of its own, which the drafter here has not."""
    narrow = {n: torch.ones([16 if s == H else 32 if s == 2 * H else s for s in t.shape])
              for n, t in weights().items() if n != "fc.weight"} | {"fc.weight": torch.ones(16, 96)}
    narrow |= {n: torch.ones(48, 16) for n in ("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight")}
    narrow |= {f"midlayer.self_attn.{p}_proj.weight": torch.ones(16, 32) for p in "kv"}
    narrow |= {"midlayer.self_attn.q_proj.weight": torch.ones(32, 32), "lm_head.weight": torch.ones(D, 16)}
    narrow |= {"midlayer.self_attn.o_proj.weight": torch.ones(16, 32), "embed_tokens.weight": torch.ones(V, 16)}
    narrow |= {"midlayer.mlp.down_proj.weight": torch.ones(16, 48)}
    folder = write(tmp_path / "source", native(hidden_size=16, target_hidden_size=H), narrow | maps())
    with pytest.raises(ConfigError, match="hidden_size = 16, but .* has 32.*another width"):
        start(base, folder)


def test_checkpoint_of_another_target_of_the_same_shape_is_said(base, tmp_path):
    """Case 36: a drafter of the target before its fine-tuning is a fair start, and the parts that differ are named
    before training; of the same target nothing is said."""
    folder = write_own(tmp_path / "own", base)
    assert len(start(base, folder).notes) == 1
    meta = json.loads((folder / "drafter.json").read_text())
    meta["target"]["fingerprint"] |= {"weights": "other", "template": "other"}
    (folder / "drafter.json").write_text(json.dumps(meta))
    assert start(base, folder).notes[1:] == ["it was made for org/target, another target than this one: "
                                             "weights, template"]
    (folder / "drafter.json").write_text(json.dumps(meta | {"kind": "medusa"}))
    with pytest.raises(ConfigError, match="a drafter of kind medusa, but drafter.kind = eagle3"):
        start(base, folder)
    del meta["shape"]["head_dim"]
    (folder / "drafter.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match="drafter.json: shape.head_dim is missing"):
        start(base, folder)
    save_file({n: t for n, t in (weights() | maps()).items() if n != "d2t"}, folder / checkpoint.WEIGHTS)
    with pytest.raises(ConfigError, match="drafter.safetensors: d2t missing"):
        start(base, folder)


class Trap:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_never_executed(base, tmp_path):
    """pytorch_model.bin is read as plain tensors: what else it holds is refused, and does not run."""
    folder = write(tmp_path / "source", native(), weights() | {"norm.weight": Trap(tmp_path / "ran")}, binary=True)
    with pytest.raises(ConfigError, match="pytorch_model.bin: cannot be read as plain tensors"):
        start(base, folder)
    assert not (tmp_path / "ran").exists()
    for content in ([1, 2], {"a": 3}):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(ConfigError, match="must be a mapping of names to tensors"):
            start(base, folder)
    (folder / "pytorch_model.bin").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="pytorch_model.bin: cannot be read"):
        start(base, folder)


def test_weights_in_several_files(base, tmp_path):
    """An index names its files; a tensor that is only in one of the two is an error (case 46), and so is a folder in
    which it is not clear which file is meant."""
    tensors, folder = weights() | maps(), tmp_path / "source"
    write(folder, native(), {})
    (folder / "model.safetensors").unlink()
    parts = {n: f"model-0000{i % 2}.safetensors" for i, n in enumerate(tensors)}
    for name in set(parts.values()):
        save_file({n: t for n, t in tensors.items() if parts[n] == name}, folder / name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": parts}))
    assert torch.equal(start(base, folder).drafter.norm.weight, tensors["norm.weight"])
    index.write_text(json.dumps({"weight_map": parts | {"lost.weight": "model-00000.safetensors"}}))
    with pytest.raises(ConfigError, match="index.json: lost.weight"):
        start(base, folder)
    swapped = {name: f"model-0000{1 - int(part[10])}.safetensors" for name, part in parts.items()}
    index.write_text(json.dumps({"weight_map": swapped}))  # the same names, each in the other file
    with pytest.raises(ConfigError, match="the index and model-0000"):
        start(base, folder)
    for value in ({"a": "../x.safetensors"}, {}, [1]):
        index.write_text(json.dumps({"weight_map": value}))
        with pytest.raises(ConfigError, match="must name files of this folder"):
            start(base, folder)
    index.unlink()
    with pytest.raises(ConfigError, match="which of them"):
        start(base, folder)
    save_file(tensors, folder / "other.safetensors")
    for name in set(parts.values()):
        (folder / name).unlink()
    assert torch.equal(start(base, folder).drafter.norm.weight, tensors["norm.weight"])
    (folder / "other.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="other.safetensors: cannot be read"):
        start(base, folder)
    (folder / "other.safetensors").unlink()
    with pytest.raises(ConfigError, match="no model.safetensors or pytorch_model.bin or medusa_lm_head.pt here"):
        start(base, folder)


def test_places_that_hold_no_drafter(base, tmp_path, monkeypatch):
    """A missing folder, a file, an empty folder, a broken config: one message that names the place."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name, message in (("no/folder", "no such folder here, and not to be had from the Hub"),
                          ("a b", "not to be had from the Hub"), (str(tmp_path / "file"), "a file; name the folder"),
                          (str(tmp_path / "empty"), "holds neither drafter.json")):
        with pytest.raises(ConfigError, match=message) as error:
            start(base, name)
        assert f"drafter.init_from = {name}" in str(error.value)
    for content in ("{", "[]"):
        (tmp_path / "empty" / "config.json").write_text(content)
        with pytest.raises(ConfigError, match="config.json: "):
            start(base, tmp_path / "empty")


def test_hub_repository(base, tmp_path, monkeypatch):
    """A Hub id is read from the Hub's own cache folder, which huggingface_hub resolves itself, without a network."""
    repository = tmp_path / "models--org--drafter"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "snapshots").mkdir()
    write(repository / "snapshots" / ("a" * 40), native(), weights() | maps())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert torch.equal(start(base, "org/drafter").drafter.norm.weight, weights()["norm.weight"])
    bare = repository / "snapshots" / ("a" * 40)
    (bare / "model.safetensors").unlink()
    torch.save(weights() | maps(), bare / "pytorch_model.bin")
    assert torch.equal(start(base, "org/drafter").drafter.norm.weight, weights()["norm.weight"])


@pytest.fixture(scope="module")
def runs(base):
    """(recipe of a run that starts from a native folder, the folder), trained."""
    source_folder = write(base.folder / "source", native(), weights() | maps())
    write_traces(base.folder / "runs" / "tiny", base.model, conversations(8, 3))
    recipe = write_recipe(base.folder / "r.yaml", base.model, train={"save_every": 2, "keep": 1},
                          drafter={"init_from": str(source_folder), "options": {"depth": 2, "deepen_at": 0.0}})
    assert call(COMMAND, recipe) == 0
    return recipe, source_folder


def test_run_that_starts_from_a_drafter_measures_it_first(base, runs):
    """The curve begins at step 0 with the source's own replayed acceptance, and step 0 stays beside the best and the
    last, so that `make eval` can compare (case 52); training has moved the weights since."""
    folder = base.folder / "runs" / "tiny" / "checkpoints"
    curve = json.loads((folder / "curve.json").read_text())
    reader = TraceReader(base.folder / "runs" / "tiny" / "traces")
    drafter = begin(section(runs[1]), base.target, {}, 0).drafter
    counts = replay(drafter, reader, reader.split("validation"), 3, torch.device("cpu"), torch.float32)
    assert curve[0] | {"mean_length": counts.mean_length, "drafts": counts.drafts, "step": 0} == curve[0]
    assert curve[0]["train_loss"] is None and "<svg" in plot_curve(curve)
    assert [row["step"] for row in curve] == [0, 4] and checkpoints.steps_in(folder)[0] == 0
    first = load_file(checkpoint.path_of(folder, 0) / checkpoint.WEIGHTS)
    assert torch.equal(first["norm.weight"], weights()["norm.weight"]) and torch.equal(first["d2t"], maps()["d2t"])
    last = load_file(checkpoint.path_of(folder, 4) / checkpoint.WEIGHTS)
    assert {name for name in first if torch.equal(first[name], last[name])} == {"d2t", "t2d"}  # case 46


def test_run_with_checkpoints_resumes_and_is_not_started_again(base, runs, capsys):
    """A second start of a finished run changes nothing; a source that has changed is refused by name (case 19)."""
    recipe, source_folder = runs
    last = checkpoint.path_of(base.folder / "runs" / "tiny" / "checkpoints", 4) / checkpoint.WEIGHTS
    before = last.read_bytes()
    assert call(COMMAND, recipe) == 0 and last.read_bytes() == before
    assert "before the first" in capsys.readouterr().out
    assert call(COMMAND, recipe, "--drafter.vocabulary", "rebuild", "--drafter.options.draft_vocab_size", "12") == 2
    assert "init_from.vocabulary was 'keep', now 'rebuild'" in capsys.readouterr().err
    kept = (source_folder / "model.safetensors").read_bytes()
    save_file(weights() | maps() | {"norm.weight": torch.ones(H)}, source_folder / "model.safetensors")
    assert call(COMMAND, recipe) == 2 and "init_from.sha256 was" in capsys.readouterr().err
    (source_folder / "model.safetensors").write_bytes(kept)
    assert call(COMMAND, recipe, "--drafter.init_from", "", "--drafter.options.draft_vocab_size", "12") == 2
    assert "trained with other settings" in capsys.readouterr().err


def test_killed_after_step_0_it_goes_on_to_the_same_weights(base, runs, tmp_path):
    """A run of which only step 0 is left ends with the weights of the undisturbed one (case 19)."""
    folder = base.folder / "runs" / "tiny" / "checkpoints"
    whole = load_file(checkpoint.path_of(folder, 4) / checkpoint.WEIGHTS)
    for step in checkpoints.steps_in(folder)[1:]:
        checkpoint.path_of(folder, step).rename(tmp_path / str(step))
    assert call(COMMAND, runs[0]) == 0
    again = load_file(checkpoint.path_of(folder, 4) / checkpoint.WEIGHTS)
    assert again.keys() == whole.keys() and all(torch.equal(again[n], whole[n]) for n in whole)


def test_a_runs_folder_names_its_best_checkpoint(base, runs):
    """drafter.init_from: runs/NAME starts from the best of that run, as evaluation and export would take it."""
    best = checkpoint.best(base.folder / "runs" / "tiny" / "checkpoints")
    assert source.find(str(base.folder / "runs" / "tiny")) == best
    begun = begin(section(base.folder / "runs" / "tiny"), base.target, COUNTS, 0)
    assert torch.equal(begun.drafter.fc.weight, load_file(best / checkpoint.WEIGHTS)["fc.weight"])
