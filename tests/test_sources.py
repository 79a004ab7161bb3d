"""Files and Hub data sets to prompts: every row counted, one bad row costs one row, the same prompts every time."""

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import parquet
from rich.console import Console

from data import hub
from data.hub import copy_of
from data.rows import describe_source, files_of
from data.sources import Loaded, load, shortened, sources_table
from recipes.errors import ConfigError, RunError
from recipes.schema import PromptSource
from tests.fake_hub import FakeHub

TEXTS = ["what is new", "tell me, \"please\", more", "naïve 😀 question"]


def read(path: Path, kind: str, share: float = 1.0, **fields) -> Loaded:
    source = PromptSource(kind=kind, path=str(path), **fields)
    return load(0, source, source, share)


def jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def texts(loaded: Loaded) -> list[str]:
    return [p.messages[-1]["content"] for p in loaded.prompts]


def write_kind(folder: Path, kind: str) -> Path:
    """TEXTS as a file of that kind, written by hand or by the format's own library."""
    path = folder / f"prompts.{kind}"
    if kind in ("jsonl", "log"):
        return jsonl(path, [{"messages": [{"role": "user", "content": t}]} for t in TEXTS])
    if kind == "json":
        path.write_text(json.dumps([{"prompt": t} for t in TEXTS]))
    elif kind == "csv":
        quoted = [t.replace('"', '""') for t in TEXTS]
        path.write_text("\ufeffid,prompt\n" + "".join(f',"{t}"\r\n' for t in quoted), encoding="utf-8", newline="")
    elif kind == "parquet":
        parquet.write_table(pa.table({"prompt": TEXTS}), path)
    else:
        path.write_text("\r\n".join([TEXTS[0], "", *TEXTS[1:]]), encoding="utf-8", newline="")
    return path


@pytest.mark.parametrize("kind", ["jsonl", "log", "json", "csv", "parquet", "text"])
def test_every_kind_of_file_holds_the_same_prompts(tmp_path, kind):
    """The same texts in any file are the same prompts with the same ids, in the file's order (case 16)."""
    loaded = read(write_kind(tmp_path, kind), kind)
    assert texts(loaded) == TEXTS and loaded.rows == 3 and not loaded.dropped
    assert [p.id for p in loaded.prompts] == [p.id for p in read(write_kind(tmp_path, "json"), "json").prompts]


def test_text_is_cut_where_the_recipe_says(tmp_path):
    """A newline makes a prompt a line, two a prompt a paragraph; blank ones are none."""
    path = tmp_path / "p.txt"
    path.write_text("\none\ntwo\n\n\nthree\n")
    assert texts(read(path, "text")) == ["one", "two", "three"]
    assert texts(read(path, "text", separator="\n\n")) == ["one\ntwo", "three"]
    with pytest.raises(ConfigError, match="`separator` is empty"):
        read(path, "text", separator="")


def test_rows_that_differ_in_type_load_to_one_form(tmp_path):
    """Arguments as text, as object and absent, and other columns: each row is read by itself (case 65)."""
    lines = []
    for arguments in ('{"city": "Rome"}', {"city": "Rome"}, None):
        call = {"id": "c", "function": {"name": "weather", "arguments": arguments}}
        lines.append({"messages": [{"role": "user", "content": "and there?"},
                                   {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "sun"}],
                      "extra": arguments})
    loaded = read(jsonl(tmp_path / "p.jsonl", lines), "jsonl")
    found = [p.messages[1]["tool_calls"][0]["function"]["arguments"] for p in loaded.prompts]
    assert found == [{"city": "Rome"}, {"city": "Rome"}, {}]
    assert loaded.normalised == {"tool arguments parsed from text": 1,
                                 "absent tool arguments made an empty object": 1}


def test_parquet_columns_of_merged_rows(tmp_path):
    """Parquet gives every row all columns, null where it has none: nulls are absent fields (case 65)."""
    path = tmp_path / "p.parquet"
    turn = {"role": "user", "content": "what is new", "tool_calls": None}
    parquet.write_table(pa.Table.from_pylist([{"messages": [turn], "prompt": None},
                                              {"messages": None, "prompt": "what is old"}]), path)
    loaded = read(path, "parquet")
    assert texts(loaded) == ["what is new", "what is old"] and loaded.formats == {"messages": 1, "prompt": 1}
    assert loaded.prompts[0].messages == [{"role": "user", "content": "what is new"}]


def test_every_odd_row_costs_one_row_and_is_counted(tmp_path):
    """Torn JSON, broken bytes, half a pair, odd roles, a megabyte: counted by reason with the first place (case 64)."""
    path = tmp_path / "p.jsonl"
    good = [json.dumps({"prompt": text}).encode() for text in TEXTS]  # escaped surrogate pairs are one character
    path.write_bytes(b"\n".join([
        good[0], b'{"prompt": ', b'{"prompt": "caf\xe9"}', b'{"prompt": "\\ud83d"}', b"", good[1], b'["x"]',
        b'{"messages": [{"role": "robot", "content": "x"}]}', b'{"messages": [{"role": "robot", "content": "y"}]}',
        b'{"prompt": "' + b"z" * 1_000_000 + b'"}', b"1" * 5000, b"[" * 100_000, good[2]]))
    loaded = read(path, "jsonl")
    assert [t for t in texts(loaded) if len(t) < 99] == TEXTS and len(loaded.prompts) == 4 and loaded.rows == 12
    assert loaded.dropped == {"not JSON": 3, "invalid unicode": 2, "not an object": 1, "unknown role": 2}
    assert loaded.first["not JSON"] == f"{path}:2" and loaded.first["unknown role"] == f"{path}:8"
    assert loaded.rows == loaded.formats.total() + loaded.dropped.total()


def test_broken_bytes_cost_one_row_in_every_text_kind(tmp_path):
    """A byte that is no UTF-8 drops its row, not the file, whatever the file's kind (case 64)."""
    for kind, content in (("json", b'[{"prompt": "caf\xe9"}, {"prompt": "fine"}]'),
                          ("csv", b"prompt\ncaf\xe9\nfine\n"), ("text", b"caf\xe9\nfine\n")):
        path = tmp_path / kind
        path.write_bytes(content)
        loaded = read(path, kind)
        assert texts(loaded) == ["fine"] and loaded.dropped == {"invalid unicode": 1}
    unchecked = pa.array([b"caf\xe9", b"fine"]).view(pa.string())
    parquet.write_table(pa.table({"prompt": unchecked}), tmp_path / "parquet")
    loaded = read(tmp_path / "parquet", "parquet")
    assert texts(loaded) == ["fine"] and loaded.dropped == {"invalid unicode": 1}


@pytest.mark.parametrize("share, stops", [(0.25, False), (0.24, True)])
def test_stop_only_above_the_set_share(tmp_path, share, stops):
    """One bad row of four is dropped up to the set share; above it the run stops, naming reason and place (case 64)."""
    path = jsonl(tmp_path / "p.jsonl", [{"prompt": t} for t in TEXTS] + [{"text": "hi"}])
    if stops:
        with pytest.raises(ConfigError, match=r"1 of 4 rows are unusable.*none of the fields.*\(first: .*p.jsonl:4\)"):
            read(path, "jsonl", share)
    else:
        assert len(read(path, "jsonl", share).prompts) == 3


@pytest.mark.parametrize("kind, content, message", [
    ("jsonl", b"\n \n", "holds no prompts"), ("jsonl", None, "No such file"), ("json", b'{"prompt": "x"}', "a list"),
    ("json", b"[1,", "cannot read prompts"), ("json", b"[" * 100_000, "nested too deeply"),
    ("text", b" ", "holds no prompts"),
    ("csv", b'prompt\n"open', "after line 1: unexpected end of data"), ("parquet", b"PAR1", "cannot read prompts"),
    ("jsonl", b"\xff\xfe\x00", "invalid unicode|not JSON"), ("csv", b"prompt\n", "holds no prompts")])
def test_file_that_cannot_be_read_is_named(tmp_path, kind, content, message):
    """An empty, torn, missing or foreign file is one message that names it (case 64)."""
    path = tmp_path / "p"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        read(path, kind, 0.1)
    assert str(path) in str(error.value)


def test_csv_cells_that_do_not_fit_the_header(tmp_path):
    """A cell too many is a bad row, a missing one an absent field, a long one is read whole (case 65)."""
    path = tmp_path / "p.csv"
    path.write_text(f"prompt,kind\none,a,b\ntwo\n{'x' * 200_000},c\n")
    loaded = read(path, "csv")
    assert [len(t) for t in texts(loaded)] == [3, 200_000] and loaded.dropped == {"more cells than columns": 1}


def test_pattern_names_files_in_order(tmp_path):
    """A pattern reads its files in name order; `rows` bounds what is read; no match and no path are errors."""
    for name in ("b", "a"):
        jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {i}"} for i in range(2)])
    assert texts(read(tmp_path / "*.jsonl", "jsonl")) == ["a 0", "a 1", "b 0", "b 1"]
    assert texts(read(tmp_path / "*.jsonl", "jsonl", rows=3)) == ["a 0", "a 1", "b 0"]
    for path, message in ((str(tmp_path / "*.json"), "no file matches"), ("", "kind jsonl needs `path`")):
        with pytest.raises(ConfigError, match=message):
            files_of(PromptSource(kind="jsonl", path=path), "prompts.sources[0]")


def test_settings_hold_the_checksum_of_every_file(tmp_path):
    """One changed byte in one of several files is another set of traces (case 30)."""
    for name in ("a", "b"):
        jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    source = PromptSource(kind="jsonl", path=str(tmp_path / "*.jsonl"))
    before = describe_source(source, "s")
    assert len(before["sha256"]) == 2 and before == describe_source(source, "s") and before["path"] == source.path
    (tmp_path / "b.jsonl").write_text('{"prompt": "c"}\n')
    assert describe_source(source, "s") != before


def test_ids_survive_reordering_and_a_limit(tmp_path):
    """A row is the same row wherever it stands in its file (case 16)."""
    lines = [{"prompt": f"question number {i}"} for i in range(20)]
    ids = {t: p.id for t, p in zip([r["prompt"] for r in lines], read(jsonl(tmp_path / "a", lines), "jsonl").prompts)}
    random.Random(0).shuffle(lines)
    again = read(jsonl(tmp_path / "b", lines), "jsonl", rows=7)
    assert len(ids) == 20 and len(again.prompts) == 7
    assert all(ids[p.messages[0]["content"]] == p.id for p in again.prompts)


def test_table_shows_what_was_found(tmp_path):
    """Path, rows, formats, what was normalised and dropped, and a short first prompt are seen before the run."""
    path = jsonl(tmp_path / "p.jsonl", [
        {"prompt": "[red]tell\x1b me\n" + "more " * 40}, {"conversations": [{"from": "human", "value": "hi"},
                                                                         {"from": "gpt", "value": "yes"}]},
        {"messages": [{"role": "system", "content": " "}, {"role": "user", "content": "hi"}]}, {"text": "x"}])
    console = Console(width=200, record=True, file=open(os.devnull, "w"))
    console.print(sources_table([read(path, "jsonl"), Loaded(1, PromptSource(count=5))], [2, 5], False))
    shown = " ".join(console.export_text().split())
    for part in (f"prompts.sources[0] jsonl {path}", "rows 4", "wanted 2", "prompt 1, ShareGPT 1, messages 1",
                 "with answers 1", "empty system turn left out 1", "none of the fields", "[red]tell me more more",
                 "prompts.sources[1] synthesis", "written by the target"):
        assert part in shown
    kept = Console(width=200, record=True, file=open(os.devnull, "w"))
    kept.print(sources_table([read(path, "jsonl")], [2], True))
    assert "with answers 1, kept for training" in " ".join(kept.export_text().split())
    assert shortened("x" * 60) == "x" * 60 and shortened("x" * 61) == "x" * 57 + "..."


def tree(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A home and a temporary folder that must stay empty, and no other place that the environment names."""
    for name in ("home", "tmp", "run"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    for name in ("HF_HOME", "XDG_CACHE_HOME", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert tree(tmp_path / "home") == tree(tmp_path / "tmp") == set()
    assert not [p for p in tree(tmp_path / "cache") if p.startswith("tmp-")]


@pytest.mark.parametrize("fields", [{}, {"streaming": True, "rows": 2}], ids=["download", "streaming"])
def test_hub_data_set_writes_below_its_cache_folder_only(tmp_path, monkeypatch, outside, fields):
    """Read from a real server once, then from the run's copy; home and temporary folder stay empty (case 61)."""
    content = "".join(json.dumps({"prompt": t}) + "\n" for t in TEXTS).encode()
    source = PromptSource(kind="hub", name="some/questions", cache_dir=str(tmp_path / "cache"), **fields)
    start, folders = hub.subprocess.run, []
    monkeypatch.setattr(hub.subprocess, "run", lambda command, env, **rest: (
        folders.extend(env[name] for name in (*hub.FOLDERS, "TMPDIR")), start(command, env=env, **rest))[1])
    with FakeHub("some/questions", {"train.jsonl": content, "README.md": b"# Questions"}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        path = copy_of(source, "prompts.sources[0]", tmp_path / "run")
        assert any(asked.endswith("/train.jsonl") for asked in server.asked)
    loaded = load(0, source, PromptSource(kind="jsonl", path=str(path)), 0.0)
    assert texts(loaded) == TEXTS[: fields.get("rows", 3)]
    assert tree(tmp_path / "run") == {path.name}
    assert all(Path(folder).is_relative_to(tmp_path / "cache") for folder in folders) and len(set(folders)) == 6
    assert any(p.endswith(".arrow") for p in tree(tmp_path / "cache")) == (not fields)
    monkeypatch.setattr(hub.subprocess, "run", None)  # a second run asks nobody
    assert copy_of(source, "prompts.sources[0]", tmp_path / "run") == path


def test_hub_data_set_that_breaks_while_read_leaves_no_copy(tmp_path, monkeypatch, outside):
    """A torn file is one message with its cause; no half copy, no temporary file (case 61)."""
    source = PromptSource(kind="hub", name="some/questions", cache_dir=str(tmp_path / "cache"))
    with FakeHub("some/questions", {"train.jsonl": b'{"prompt": "a"}\n{"prompt": ', "README.md": b"x"}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(ConfigError, match=r"'some/questions' \(default, train\): .*JSON") as error:
            copy_of(source, "prompts.sources[0]", tmp_path / "run")
    assert "\n" not in str(error.value) and tree(tmp_path / "run") == set()


def test_hub_out_of_reach_names_the_last_request(tmp_path, monkeypatch):
    """The library hides why a request failed, and its log tells."""
    log = "warning\n'[Errno 111] Connection refused' thrown while requesting HEAD http://hub/x\nRetrying in 1s\n"
    monkeypatch.setattr(hub.subprocess, "run", lambda *args, **rest: SimpleNamespace(
        returncode=3, stdout="cannot reach the Hub (x)\n", stderr=log))
    with pytest.raises(RunError, match=r"cannot reach the Hub \(x\); the last request: '\[Errno 111\] Connection "
                                       "refused' thrown while requesting HEAD http://hub/x$"):
        copy_of(PromptSource(kind="hub", name="no/set", cache_dir=str(tmp_path)), "prompts.sources[0]", tmp_path)


@pytest.mark.parametrize("fields, error, message", [
    ({"name": "no/set"}, RunError, r"'no/set' \(default, train\): cannot reach the Hub \(Couldn't reach 'no/set' .*"
     "OfflineModeIsEnabled.*HF_HUB_OFFLINE"),
    ({"split": "test"}, ConfigError, r"\(default, test\): Unknown split"),
    ({"streaming": True}, ConfigError, "streaming needs `rows`"), ({"name": ""}, ConfigError, "needs `name`")])
def test_hub_failure_is_one_message_and_leaves_nothing(tmp_path, fields, error, message):
    """Offline, or with a wrong name: one clear line; no copy and no temporary file is left (case 61)."""
    (tmp_path / "run").mkdir()
    (tmp_path / "set").mkdir()
    jsonl(tmp_path / "set" / "train.jsonl", [{"prompt": t} for t in TEXTS])
    values = {"name": str(tmp_path / "set"), "cache_dir": str(tmp_path / "cache")} | fields
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(error, match=message) as found:
            copy_of(PromptSource(kind="hub", **values), "prompts.sources[0]", tmp_path / "run")
    assert not any(text in str(found.value) for text in ("\n", "Traceback", "Errno None", str(tmp_path / "run")))
    assert tree(tmp_path / "run") == set()
    assert not [p for p in tree(tmp_path) if p.startswith("cache/tmp-")]
