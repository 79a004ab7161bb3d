"""Traces behind an fsspec URL: what a local folder holds, read through a bounded local one, errors by name."""

import json
import shutil
import socketserver
import threading
from collections import namedtuple
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import fsspec
import pytest
from fsspec.registry import known_implementations
from moto.server import ThreadedMotoServer
from safetensors.torch import load_file

from data import collect, remote, remoterows
from data.capture import capture
from data.collect import COMMAND as TRACE
from data.generate import Generator
from data.reader import open_manifest, open_rows, with_states
from data.remote import Remote
from data.remoterows import RemoteRows
from data.store import TraceReader, TraceRow
from data.tracetool import COMMAND as INSPECT
from drafters.target import Target
from recipes.cli import run
from recipes.errors import ConfigError, RunError
from recipes.loader import load_recipe
from tests.tiny import call, llama, write_prompts, write_recipe, write_target
from train.run import COMMAND as TRAIN

TEXTS = [f"tell me in a few simple words how one forecasts {thing} for the next day, and why that fails" for thing in
         ("rain", "snow", "wind", "fog", "hail", "frost", "dew", "mist", "ice", "heat")]
SECOND = "shards/shard-00001"
FIELDS = ("ids", "turns", "taps", "final")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A recipe whose ten rows fill several shards of 1 MB; the folder of its run `tiny` holds what `make trace` left
    behind a URL."""
    folder = tmp_path_factory.mktemp("remote")
    model, prompts = write_target(folder / "model"), write_prompts(folder / "prompts.jsonl", TEXTS)
    llama(hidden=256).save_pretrained(model)
    recipe = write_recipe(folder / "r.yaml", model,
                          prompts={"sources": [{"kind": "jsonl", "path": str(prompts)}], "validation": 3},
                          generation={"max_tokens": 8, "unit_rows": 4}, train={"batch_rows": 2},
                          trace={"layers": [1, 2, 3], "shard_mb": 1, "verify_rows": 2})
    fs = fsspec.filesystem("memory")
    assert call(TRACE, recipe, "--name", "reference", "--trace.url", "memory://reference/traces") == 0
    for name, content in objects(fs, "/reference/traces").items():
        (local(recipe) / name).parent.mkdir(parents=True, exist_ok=True)
        (local(recipe) / name).write_bytes(content)
    assert len(list((folder / "runs/tiny/traces/shards").glob("*.safetensors"))) >= 3
    return recipe


@pytest.fixture
def memory():
    """An empty store in memory, by its URL and file system."""
    fs = fsspec.filesystem("memory")
    fs.rm("/store", recursive=True) if fs.exists("/store") else None
    return "memory://store/traces", fs


def local(base: Path) -> Path:
    return base.parent / "runs" / "tiny" / "traces"


def fill(base: Path, fs, root: str) -> None:
    """The objects that `make trace` leaves there, copied from the local run."""
    for name, content in content_of(local(base)).items():
        fs.pipe_file(f"{root}/{name}", content)


def content_of(traces: Path) -> dict[str, bytes]:
    return {p.relative_to(traces).as_posix(): p.read_bytes() for p in sorted(traces.rglob("*"))
            if p.is_file() and p.name != "provenance.json"}


def objects(fs, root: str) -> dict[str, bytes]:
    return {path[len(root) + 1:]: fs.cat_file(path) for path in fs.find(root)
            if not path.endswith("provenance.json")}


def forbid_work(monkeypatch) -> None:
    def work(*args, **kwargs):
        raise AssertionError("finished work was done again")

    monkeypatch.setattr(Generator, "run", work)
    monkeypatch.setattr(collect, "capture", work)


def same_bits(a: TraceRow, b: TraceRow) -> bool:
    return (a.id, a.split, a.tail) == (b.id, b.split, b.tail) and all(
        getattr(a, f).equal(getattr(b, f)) for f in FIELDS)


def same_store(traces: Path, base: Path) -> None:
    """The reference's files, but for the last bits of states: those that come with the answers are summed otherwise."""
    ours, theirs = content_of(traces), content_of(local(base))
    assert ours.keys() == theirs.keys()
    assert all(ours[name] == theirs[name] for name in ours if not name.startswith("shards/"))
    a, b = TraceReader(traces), TraceReader(local(base))
    for i in range(len(b)):
        assert a[i].id == b[i].id and a[i].ids.equal(b[i].ids) and a[i].turns.equal(b[i].turns)
        assert (a[i].taps - b[i].taps).abs().max() < 1e-4 * b[i].taps.abs().max()


def test_objects_are_those_of_a_local_folder(base, memory, monkeypatch):
    """A URL holds name for name what a local folder holds, the disk no shard; another machine finds the work done
    (cases 14, 16)."""
    assert call(TRACE, base, "--name", "here") == 0
    same_store(base.parent / "runs" / "here" / "traces", base)
    url, fs = memory
    assert call(TRACE, base, "--name", "m", "--trace.url", url) == 0
    assert objects(fs, "/store/traces") == content_of(local(base))
    here = base.parent / "runs" / "m"
    assert not list(here.rglob("*.safetensors"))
    shutil.rmtree(here)
    forbid_work(monkeypatch)
    assert call(TRACE, base, "--name", "m", "--trace.url", url) == 0
    assert objects(fs, "/store/traces") == content_of(local(base))


def test_local_traces_move_behind_a_url(base, memory, monkeypatch):
    """A finished local run that is given a URL is put there; nothing is made again (case 16)."""
    shutil.copytree(local(base), base.parent / "runs" / "moved" / "traces")
    forbid_work(monkeypatch)
    assert call(TRACE, base, "--name", "moved", "--trace.url", memory[0]) == 0
    assert objects(memory[1], "/store/traces") == content_of(local(base))
    assert not list((base.parent / "runs" / "moved").rglob("*.safetensors"))


def test_torn_unit_is_answered_again(base, memory, monkeypatch):
    """Of the answers only the unit whose object is torn is made again, and put again; no state (cases 16, 35)."""
    url, fs = memory
    fill(base, fs, "/store/traces")
    unit = "/store/traces/answers/0-00001.json"
    fs.pipe_file(unit, fs.cat_file(unit)[:50])
    generate, asked = Generator.run, []
    monkeypatch.setattr(Generator, "run", lambda self, requests, **named: (
        asked.extend(r.id for r in requests), generate(self, requests, **named))[1])
    monkeypatch.setattr(collect, "capture", None)
    assert call(TRACE, base, "--name", "torn", "--trace.url", url) == 0
    assert len(asked) == 4 and objects(fs, "/store/traces") == content_of(local(base))


class Killed(BaseException):
    """Passes every handler, as a kill would."""


@pytest.mark.parametrize("point", [1, 4, 7])
def test_run_stopped_at_any_put_goes_on_to_the_same_objects(base, memory, monkeypatch, tmp_path, point):
    """Stopped before its n-th object is put, on the same machine or with its local folder lost, the same command ends
    with the objects of an undisturbed run (cases 16, 35)."""
    url, fs = memory
    put, left = Remote.put, [point]

    def dying(self, name):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        put(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "put", dying)
        with pytest.raises(Killed):
            run(TRACE, ["--config", str(base), "--name", "k", "--trace.url", url])
    if point % 2:
        shutil.rmtree(base.parent / "runs" / "k")
    assert call(TRACE, base, "--name", "k", "--trace.url", url) == 0
    assert objects(fs, "/store/traces") == content_of(local(base))
    shutil.rmtree(base.parent / "runs" / "k")


def opened(base: Path, url: str, run_folder: Path, **flags: str) -> RemoteRows:
    section = load_recipe(base, {"trace.url": url, **{f"trace.{k}": v for k, v in flags.items()}}).trace
    return open_rows(section, run_folder)


def test_rows_are_those_of_a_local_folder_within_the_size(base, memory, tmp_path, monkeypatch):
    """Rows come bit for bit as from the local folder; the local files never exceed the limit; read shard by shard each
    is fetched once, and the one used longest ago goes first (cases 14, 35)."""
    url, fs = memory
    fill(base, fs, "/store/traces")
    wanted = TraceReader(local(base))
    largest = max(p.stat().st_size for p in local(base).rglob("*.safetensors"))
    rows = opened(base, url, tmp_path / "run", cache_gb=str(2.5 * largest / 1e9))
    get, fetched = Remote.get, []
    monkeypatch.setattr(Remote, "get", lambda self, names: (fetched.extend(names), get(self, names))[1])
    assert len(rows) == len(wanted) and rows.split("validation") == wanted.split("validation")
    held = tmp_path / "run" / "cache" / "traces" / "shards"
    for i in range(len(wanted)):
        assert same_bits(rows[i], wanted[i]) and rows.shard(i) == wanted.shard(i)
        assert (rows.tokens(i), rows.supervised(i)) == (wanted.tokens(i), wanted.supervised(i))
        assert sum(p.stat().st_size for p in held.glob("*.safetensors")) <= 2.5 * largest
    assert len(fetched) == len(set(fetched)) == len(wanted.manifest["shards"]) >= 3
    last = [len(wanted) - 1, wanted.places.index(next(p for p in wanted.places if p.shard == "shard-00000"))]
    assert all(same_bits(rows[i], wanted[i]) for i in last)
    assert fetched[-1] == "shards/shard-00000.safetensors" and len(fetched) == len(set(fetched)) + 1
    here = {p.stem for p in held.glob("*.safetensors")}
    assert {"shard-00000", wanted.shard(last[0])} <= here and "shard-00001" not in here


def test_two_readers_share_the_local_folder(base, memory, tmp_path, monkeypatch):
    """What one process fetched another one reads, and what one drops another one fetches again (case 14)."""
    url, fs = memory
    fill(base, fs, "/store/traces")
    wanted = TraceReader(local(base))
    size = str(1.5 * max(p.stat().st_size for p in local(base).rglob("*.safetensors")) / 1e9)
    first, second = (opened(base, url, tmp_path / "run", cache_gb=size) for _ in range(2))
    assert same_bits(first[0], wanted[0])
    with monkeypatch.context() as patch:
        patch.setattr(Remote, "get", None)
        assert same_bits(second[0], wanted[0])
    last = len(wanted) - 1
    assert same_bits(second[last], wanted[last]) and same_bits(first[0], wanted[0])


def test_training_from_a_url_is_training_from_a_folder(base, memory):
    """`make train` ends with the same bits whether its rows come from a URL or a local folder."""
    url, fs = memory
    fill(base, fs, "/store/traces")
    assert call(TRAIN, base) == 0 and call(TRAIN, base, "--name", "u", "--trace.url", url) == 0
    a, b = (load_file(next((base.parent / "runs" / name / "checkpoints").glob("step-*")) / "drafter.safetensors")
            for name in ("tiny", "u"))
    assert set(a) == set(b) and all(a[name].equal(b[name]) for name in a)
    recipe = load_recipe(base, {"trace.url": url})
    assert open_manifest(recipe.trace, base.parent / "runs" / "u")["layers"] == [1, 2, 3]


def test_rows_without_states_work_behind_a_url(base, memory, tmp_path):
    """Mode online and a URL together: the rows come from there, the states from the target."""
    url, fs = memory
    assert call(TRACE, base, "--name", "o", "--trace.url", url, "--trace.mode", "online") == 0
    recipe = load_recipe(base, {"trace.url": url, "trace.mode": "cache"})
    rows = open_rows(recipe.trace, tmp_path / "run")
    wanted = TraceReader(local(base))
    for _ in range(2):
        reader = with_states(rows, recipe.trace, tmp_path / "run", Target(recipe.target, recipe.trace.layers))
        off = (reader[0].taps - wanted[0].taps).abs().max()
        assert off < 1e-4 * wanted[0].taps.abs().max() and reader[0].ids.equal(wanted[0].ids)


def truncate(fs, name: str) -> None:
    fs.pipe_file(f"{name}.safetensors", fs.cat_file(f"{name}.safetensors")[:-40])


def flip(fs, name: str) -> None:
    content = bytearray(fs.cat_file(f"{name}.safetensors"))
    content[-3] ^= 1
    fs.pipe_file(f"{name}.safetensors", bytes(content))


def lose(fs, name: str) -> None:
    fs.rm_file(f"{name}.safetensors")


def lose_list(fs, name: str) -> None:
    fs.rm_file(f"{name}.json")


def tear_list(fs, name: str) -> None:
    fs.pipe_file(f"{name}.json", fs.cat_file(f"{name}.json")[:60])


def foreign(fs, name: str) -> None:
    listed = json.loads(fs.cat_file(f"{name}.json"))
    fs.pipe_file(f"{name}.json", json.dumps(listed | {"key": "k2"}).encode())


def renamed(fs, name: str) -> None:
    for kind in ("safetensors", "json"):
        fs.pipe_file(f"{name}.{kind}", fs.cat_file(f"{name[:-1]}0.{kind}"))


@pytest.mark.parametrize("damage, message", [
    (truncate, "bytes of"), (flip, "checksum differs"), (lose, "missing or torn"), (lose_list, "missing or torn"),
    (tear_list, "missing or torn"), (foreign, "another trace set"), (renamed, "another trace set")],
    ids=lambda v: v.__name__ if callable(v) else "")
def test_damaged_object_is_refused_and_mended(base, memory, tmp_path, monkeypatch, capsys, damage, message):
    """A torn, edited, lost, foreign or renamed object is never read: the message names the URL; verify finds it, repair
    writes it again, from the answers that are there (cases 35, 30)."""
    url, fs = memory
    fill(base, fs, "/store/traces")
    damage(fs, f"/store/traces/{SECOND}")
    with pytest.raises(RunError, match=message) as error:
        rows = opened(base, url, tmp_path / "run")
        [rows[i] for i in range(len(rows))]
    assert f"{url}/{SECOND}" in str(error.value)
    flags = ("--name", f"d-{damage.__name__}", "--trace.url", url)
    assert call(INSPECT, base, *flags, "--verify") == 1 and SECOND in capsys.readouterr().out
    monkeypatch.setattr(Generator, "run", None)
    captured = []
    monkeypatch.setattr(collect, "capture", lambda t, rows, *r: (captured.append(rows), capture(t, rows, *r))[1])
    assert call(INSPECT, base, *flags, "--repair") == 0, capsys.readouterr()
    assert len(captured) == (2 if damage is renamed else 1)  # rows that stand twice put both shards at fault
    assert objects(fs, "/store/traces") == content_of(local(base))
    rows = opened(base, url, tmp_path / "run")
    assert [rows[i].id for i in range(len(rows))]


def test_object_that_is_no_part_of_the_set_is_found_and_removed(base, memory, capsys):
    """A shard that the manifest does not name is a fault behind a URL too (case 35)."""
    url, fs = memory
    fill(base, fs, "/store/traces")
    fs.pipe_file("/store/traces/shards/shard-00099.safetensors", b"x")
    assert call(INSPECT, base, "--name", "s", "--trace.url", url) == 0 and url in capsys.readouterr().out
    assert call(INSPECT, base, "--name", "s", "--trace.url", url, "--repair") == 0
    assert "removed: shards/shard-00099.safetensors" in capsys.readouterr().out
    assert objects(fs, "/store/traces") == content_of(local(base))


def test_traces_of_other_settings_behind_the_url_are_refused(base, memory, capsys):
    """Another set there, or another one in the local folder, is never mixed in (case 30)."""
    url, fs = memory
    fill(base, fs, "/store/traces")
    assert call(TRACE, base, "--name", "x", "--trace.url", url, "--generation.max_tokens", "7") == 2
    assert "generation.max_tokens was 8, now 7" in capsys.readouterr().err
    assert call(TRACE, base, "--name", "y", "--generation.max_tokens", "7") == 0
    assert call(TRACE, base, "--name", "y", "--trace.url", url) == 2
    assert f"holds traces of other settings than {url}" in capsys.readouterr().err
    assert objects(fs, "/store/traces") == content_of(local(base))


def test_torn_settings_behind_the_url_are_named(base, memory, capsys):
    """settings.json that is no JSON object: its URL and what to do, exit code 1; nothing there is changed (case 35)."""
    url, fs = memory
    fill(base, fs, url.removeprefix("memory:/"))
    fs.pipe_file(f"{url}/settings.json", b'{"torn": ')
    before = objects(fs, url.removeprefix("memory:/"))
    assert call(TRACE, base, "--trace.url", url) == 1
    assert f"{url}/settings.json: is not the JSON object" in capsys.readouterr().err
    assert objects(fs, url.removeprefix("memory:/")) == before


def test_limit_below_a_shard_is_refused(base, memory, tmp_path):
    """trace.cache_gb must hold one shard; the message says how much (case 14)."""
    fill(base, memory[1], "/store/traces")
    with pytest.raises(ConfigError, match="trace.cache_gb = 0.0001: the largest shard of memory://store/traces has"):
        opened(base, memory[0], tmp_path / "run", cache_gb="0.0001")


def test_disk_without_room_for_the_shards_is_refused(base, memory, tmp_path, monkeypatch):
    """Before the first row: what is missing of cache and store must fit on the disk (case 14)."""
    fill(base, memory[1], "/store/traces")
    monkeypatch.setattr(remoterows.shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(1000))
    with pytest.raises(RunError, match="shards need .* MB more, 0 MB are free; lower trace.cache_gb"):
        opened(base, memory[0], tmp_path / "run")


def test_file_url_is_the_folder_itself(base, tmp_path):
    """file:// means the local folder that it names, written with renames as ever; nothing is copied."""
    folder = tmp_path / "elsewhere"
    flags = ("--name", "f", "--trace.url", folder.as_uri())
    assert call(TRACE, base, *flags) == 0
    same_store(folder, base)
    assert not (base.parent / "runs" / "f" / "traces").exists()
    assert call(INSPECT, base, *flags, "--verify") == 0
    rows = open_rows(load_recipe(base, {"trace.url": folder.as_uri()}).trace, tmp_path / "run")
    assert isinstance(rows, TraceReader) and rows.folder == folder


def test_preview_puts_nothing(base, memory, capsys):
    """A preview keeps nothing, behind a URL neither."""
    assert call(TRACE, base, "--name", "p", "--trace.url", memory[0], "--preview") == 0
    assert "Free on disk: unknown behind a URL" in " ".join(capsys.readouterr().out.split())
    assert not memory[1].find("/store")


@pytest.mark.parametrize("url, message", [
    ("nosuch://bucket/x", "Protocol not known: nosuch"), ("bucket/x", "not a URL"),
    ("lacking://bucket/x", "Install lacking to use it"),
    ("s3://key:hush@bucket/x", "holds a password"), ("https://host/x?token=hush", "holds a password or a query"),
])
def test_unusable_url_is_a_mistake_of_the_recipe(base, tmp_path, capsys, monkeypatch, url, message):
    """One message with exit code 2, before the target is loaded; a secret is neither shown nor written (case 64)."""
    absent = {"class": "lacking_package.FileSystem", "err": "Install lacking to use it"}
    monkeypatch.setitem(known_implementations, "lacking", absent)
    monkeypatch.setattr(collect, "open_target", None)
    assert call(TRACE, base, "--runs_dir", str(tmp_path), "--trace.url", url) == 2
    error = capsys.readouterr().err
    assert message in error and "hush" not in error and "Traceback" not in error
    assert not any(b"hush" in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


class Forbids(BaseHTTPRequestHandler):
    """An S3 server that lets nobody in."""

    def do_GET(self) -> None:
        body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def s3(monkeypatch):
    """Points fsspec's own configuration of s3 at an endpoint on loopback."""
    def use(endpoint: str):
        monkeypatch.setitem(fsspec.config.conf, "s3", {
            "key": "k", "secret": "s", "endpoint_url": endpoint, "config_kwargs": {"retries": {"max_attempts": 0}}})
        return fsspec.filesystem("s3")

    return use


@pytest.fixture(scope="module")
def server():
    """A real S3 server on loopback."""
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


def test_traces_on_s3(base, server, s3, tmp_path, monkeypatch, capsys):
    """The whole way on S3: traced, found done from an empty machine, read, verified, a torn object mended
    (cases 14, 16, 35)."""
    fs, url = s3(server), "s3://bucket/some/traces"
    flags = ("--name", "s3", "--trace.url", url)
    assert call(TRACE, base, *flags) == 1
    assert f"{url}: does not exist" in capsys.readouterr().err
    fs.mkdir("bucket")
    assert call(TRACE, base, *flags) == 0
    assert objects(fs, "bucket/some/traces") == content_of(local(base))
    shutil.rmtree(base.parent / "runs" / "s3")
    with monkeypatch.context() as patch:
        forbid_work(patch)
        assert call(TRACE, base, *flags) == 0
    rows, wanted = opened(base, url, tmp_path / "run"), TraceReader(local(base))
    assert len(rows) == len(wanted) and all(same_bits(rows[i], wanted[i]) for i in range(len(wanted)))
    flip(fs, f"bucket/some/traces/{SECOND}")
    assert call(INSPECT, base, *flags, "--verify") == 1 and "checksum differs" in capsys.readouterr().out
    assert call(INSPECT, base, *flags, "--repair") == 0
    assert objects(fs, "bucket/some/traces") == content_of(local(base))
    assert not any(word in (base.parent / "runs" / "s3" / "recipe.yaml").read_text() for word in ("secret", server))


def test_store_that_refuses_or_is_not_there(base, s3, capsys):
    """No permission and no connection: exit code 1, the URL, what to do, no traceback (case 64)."""
    url = "s3://bucket/x"
    with socketserver.TCPServer(("127.0.0.1", 0), Forbids) as forbids:
        thread = threading.Thread(target=forbids.serve_forever)
        thread.start()
        s3(f"http://127.0.0.1:{forbids.server_address[1]}")
        refused = call(TRACE, base, "--name", "n", "--trace.url", url), capsys.readouterr().err
        forbids.shutdown()
        thread.join()
        closed = forbids.server_address[1]
    assert refused[0] == 1 and f"{url}: no permission" in refused[1] and "check the credentials" in refused[1]
    s3(f"http://127.0.0.1:{closed}")
    for command in (TRACE, TRAIN, INSPECT):
        assert call(command, base, "--name", "n", "--trace.url", url) == 1
        error = capsys.readouterr().err
        assert f"{url}: " in error and "whether the store can be reached" in error and "Traceback" not in error


def test_client_errors_name_classes_that_exist():
    """The table of foreign errors is right where its package is installed (S3 here)."""
    assert [c.__name__ for c in Remote("s3://bucket/x", Path()).errors] == ["OSError", "ValueError", "BotoCoreError"]
    assert set(remote.CLIENT_ERRORS) == set(remote.OBJECT_STORES)
