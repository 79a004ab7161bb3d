"""The recipe's hardware in its best and its worst case, and what is assumed of it."""

from dataclasses import dataclass

from drafters.placement import pick_device
from drafters.target import use_threads
from eval.probe import measure
from recipes.cost import Format, Speed
from recipes.errors import ConfigError
from recipes.hardware import THIS_MACHINE, Hardware, find
from recipes.model_shape import ModelShape, quantised_bits
from recipes.schema import Plan, Recipe
from recipes.stages import Machine

BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0}
EAGER = ("eager PyTorch: Qwen2.5-7B on an H100 reads at 27 % of the bandwidth (arXiv 2605.30571: 0.35 ms a layer), "
         "Llama-7B on an A100 39 ms where its weights take 7 (pytorch.org, accelerating-generative-ai-2: 1 ms)")
GRAPHS = ("CUDA graphs: from nothing to what Kimi-K2 leaves of 15.8 ms a step on eight H200 in SGLang (SpecForge's "
          "data.json); Llama-3.1-8B leaves less of 7.07 ms on an H100 in vLLM (issue 20780)")
LINK_SHARE = 0.8  # of a link's peak that a sum over GPUs reaches
READING = ("70B fp8 on an H200 in TensorRT-LLM 74 % of what reading the weights allows; 7B and 8B in bf16 on an A100 "
           "with CUDA graphs 72 to 74 % (READMEs of gpt-fast, torchao); a smaller model reaches less")
PRODUCTS = ("training on H100 in bf16 reached 0.26 to 0.46 of the peak, 0.59 with recomputation counted "
            "(llm-foundry's table, 760M to 70B); narrow drafters reach less")


@dataclass(frozen=True)
class Assumption:
    """One thing that is not known: the value of the best and of the worst case, and why these."""

    name: str
    best: float
    worst: float
    why: str


def span(section: Plan, field: str, default: tuple[float, float], why: str, more_is_better: bool = True) -> Assumption:
    """The recipe's `plan.<field>`, or the default (low, high) with its reason."""
    given = getattr(section, field)
    low, high = (min(given), max(given)) if given else default
    best, worst = (high, low) if more_is_better else (low, high)
    return Assumption(f"plan.{field}", best, worst, "the recipe" if given else why)


def hardware_of(recipe: Recipe) -> Hardware:
    """The table's entry, or this machine measured. ConfigError for an unknown name."""
    if recipe.plan.hardware != THIS_MACHINE:
        return find(recipe.plan.hardware, recipe.plan.custom)
    use_threads(recipe.target.threads)
    return measure(pick_device(recipe.target.device), [recipe.target.dtype, recipe.train.dtype])


def formats(recipe: Recipe, shape: ModelShape, config: dict) -> tuple[Format, Format, Format]:
    """How the target is kept while it answers, computes states, and in the stages of one process. ConfigError where
    the GPUs cannot share it."""
    section, share = recipe.plan, recipe.plan.tensor_parallel
    if section.gpus % share:
        raise ConfigError(f"plan.gpus = {section.gpus}: must be a multiple of plan.tensor_parallel = {share}")
    bits = BITS[recipe.target.dtype]
    weights = section.weight_bits or quantised_bits(config) or bits

    def keep(engine: bool, shared: bool) -> Format:
        if shared:
            shape.check_split(share, "plan.tensor_parallel", copies=engine)
        return Format(weights, bits, bits, share if shared else 1, 1 if shared else share, expanded=not engine)

    serves = recipe.generation.backend in ("vllm", "openai")
    answering = keep(serves, serves or bool(recipe.target.tp_plan))
    engine = recipe.trace.backend == "vllm"
    return answering, keep(engine, engine or bool(recipe.target.tp_plan)), keep(False, False)


def machines(recipe: Recipe, found: Hardware, bits: float,
             weights: float) -> tuple[Machine, Machine, list[Assumption]]:
    """The best and the worst case of the hardware. `bits` of the target's layers: an engine multiplies 8 of them as
    fp8; `weights`: bytes of the target a GPU, held twice where a CPU packs them."""
    section, own = recipe.plan, "it was measured; products differ"
    moved = span(section, "bandwidth_share", (0.7, 1.0) if found.measured else (0.6, 0.9),
                 own if found.measured else READING)
    done = span(section, "compute_share", (0.5, 1.0) if found.measured else (0.25, 0.6),
                own if found.measured else PRODUCTS)
    layer = span(section, "layer_us", (0.7 * found.layer_us, 1.5 * found.layer_us) if found.measured else (100, 1000),
                 own if found.measured else EAGER, more_is_better=False)
    fixed = found.measured or bool(section.layer_us)
    engine = layer if fixed else Assumption("layer_us of a serving engine", 0, 150, GRAPHS)
    disk = span(section, "disk_mb_s", (200, 2000), "from a local NVMe to a network disk")
    start = Assumption("seconds to start a stage", 10, 60, "imports and first calls")
    base = Assumption("GB of a process", 0.7 if found.cpu else 0.5, 1.5, "libraries; on a GPU its context")
    overlap = Assumption("overlap of moving and computing", 8.0, 1.0, "exponent of the norm: nearly all, or none")
    served = "fp8" if 8 <= bits < 9 and "fp8" in found.tflops else recipe.target.dtype

    def one(case: str) -> Machine:
        def speed(dtype: str, over: Assumption) -> Speed:
            return Speed(getattr(moved, case) * found.bandwidth_tb_s * 1e12, getattr(done, case) * found.flops(dtype),
                         LINK_SHARE * found.link_gb_s * 1e9, getattr(over, case) * 1e-6, 0.0, getattr(overlap, case))

        packed = weights if found.cpu and recipe.target.skinny_linear and case == "worst" else 0.0
        return Machine(section.gpus, speed(recipe.target.dtype, layer), speed(served, engine),
                       speed(recipe.train.dtype, layer), getattr(disk, case) * 1e6, getattr(start, case),
                       getattr(base, case) * 1e9 + packed)

    return one("best"), one("worst"), [moved, done, layer, *([] if fixed else [engine]), disk, start, base, overlap]
