"""Small language models as drafters: what one begins as, and what the registry calls (drafters/small_lm.py).

Legend: V vocabulary, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafters.export.plain import facing, model_of, skeleton_of
from drafters.layer_cut import cut
from drafters.small_lm import Options, Shape, SmallLM
from recipes.draft_cost import ModelSize
from recipes.errors import ConfigError
from recipes.model_shape import ModelShape

# Acceptance lengths that `make plan` takes for the worst and the best case, and why these.
EXPECTED_LENGTHS = ((1.2, 3.0), "at best what a good sibling model of a tenth of the target's size keeps; some of a "
                                "target's layers keep little before they are trained")


def kept_layers(options: Options, depth: int) -> list[int]:
    """Layers of a target of `depth` that the drafter begins as. ConfigError where they are not fewer, or not its."""
    if options.keep:
        if options.keep[-1] >= depth or len(options.keep) == depth:
            raise ConfigError(f"drafter.options.keep = {options.keep}: must name fewer than all of the target's "
                              f"layers 0 to {depth - 1}")
        return list(options.keep)
    count = options.layers or max(1, depth // 3)
    if count >= depth:
        raise ConfigError(f"drafter.options.layers = {count}: must be fewer than the target's {depth}")
    if options.pick == "first":
        return list(range(count))
    return [round(i * (depth - 1) / max(1, count - 1)) for i in range(count)]


def config_of(model: nn.Module) -> dict[str, Any]:
    """config.json of a model, without what says where it was loaded from, and in float32."""
    values = {key: value for key, value in model.config.to_dict().items()
              if not key.startswith("_") and key not in ("transformers_version", "name_or_path", "quantization_config")}
    return values | {"dtype": "float32", "architectures": [type(model).__name__]}


def from_target(options: Options, target: Any) -> nn.Module:
    """Some of the target's layers with its embedding, norm and head, as weights of their own. ConfigError where the
    target is no plain language model on one device."""
    section = target.section
    if section.device_map or section.tp_plan or target.model.config.model_type != target.config.model_type:
        raise ConfigError(f"drafter.kind = small_lm: target.model = {section.model} is spread over devices or more "
                          "than a language model; name a small model in drafter.options.sibling")
    borrowed = cut(target.model, target.depth, kept_layers(options, target.depth))
    model = model_of(config_of(borrowed))
    model.load_state_dict({name: t.float().cpu() for name, t in borrowed.state_dict().items()})
    return model


def from_sibling(name: str, target: Any) -> nn.Module:
    """A small model of the target's tokenizer. ConfigError where it cannot be loaded, or reads other ids."""
    field = f"drafter.options.sibling = {name}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, use_safetensors=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{field}: cannot be loaded: {first:.300}") from None
    if tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise ConfigError(f"{field}: its tokenizer gives other ids than target.model = {target.section.model} has; "
                          "engines verify ids: name a model of the same family")
    if model.config.vocab_size != target.vocab_size:
        raise ConfigError(f"{field}: has {model.config.vocab_size} rows of vocabulary, the target {target.vocab_size}; "
                          "engines want as many")
    return model


def build(options: Options, target: Any, counts: dict[int, int], seed: int) -> SmallLM:
    """A drafter for a loaded target; counts and seed do not matter: nothing in it is random. ConfigError
    where processes that share the target would have to read unlike texts with it."""
    if options.on_policy and target.section.tp_plan:
        raise ConfigError(f"drafter.options.on_policy = {options.on_policy}: every process reads text of its own, "
                          "which a target that they share cannot; leave target.tp_plan empty, or on_policy 0")
    model = from_sibling(options.sibling, target) if options.sibling else from_target(options, target)
    shape = Shape(target.vocab_size, target.vocab_size, target.hidden, target.depth, config_of(model))
    return SmallLM(options, shape, model, target)


def load(options: Options, shape: dict[str, Any], layers: list[int], tensors: dict[str, Tensor],
         target: Any) -> SmallLM:
    """A drafter from a checkpoint's parts, on a loaded target. ConfigError where tensors are missing, unexpected or of
    another shape, or for another target."""
    own, tensors = Shape.read(shape), dict(tensors)
    for name in ("d2t", "t2d"):  # every token is one of the drafter's
        tensors.pop(name, None)
    if (own.vocab_size, own.target_hidden_size) != (target.vocab_size, target.hidden):
        raise ConfigError(f"the drafter is for a target with vocabulary {own.vocab_size} and hidden size "
                          f"{own.target_hidden_size}; this target has {target.vocab_size} and {target.hidden}")
    skeleton = skeleton_of(own.config)  # a config must not make room for more than the file holds
    sizes = {f"model.{name}": tuple(p.shape) for name, p in skeleton.named_parameters()}
    names = [f"model.{name}" for name in facing(skeleton)]
    lent = dict(zip(names, (target.embedding, target.head_weight))) if options.borrows else {}
    given = {name: t.float().cpu() for name, t in lent.items()} | tensors
    found = {name: tuple(t.shape) for name, t in given.items()}
    if sizes != found or lent.keys() & tensors.keys():
        wrong = sorted(set(sizes.items()) ^ set(found.items())) or sorted(lent.keys() & tensors.keys())
        raise ConfigError(f"the checkpoint's tensors do not fit the drafter: {wrong[:4]}")
    model = model_of(own.config)
    drafter = SmallLM(options, own, model, target)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(given[name])
    return drafter


def cost(options: Options, shape: ModelShape, config: dict[str, Any], taps: int) -> ModelSize:
    """Sizes of the drafter for a target of this shape and text config, for `make plan`. ConfigError for a sibling,
    whose sizes the recipe does not say."""
    if options.sibling:
        raise ConfigError(f"drafter.options.sibling = {options.sibling}: make plan knows the sizes of a drafter that "
                          "begins as layers of its target; leave it empty to see those")
    a, H = shape.attention, shape.hidden
    dim = a.cached // (2 * a.kv_heads) if a.kv_heads else H // a.heads
    return ModelSize(H, H, 0, a.heads, a.kv_heads or a.heads, dim, config["intermediate_size"], shape.vocab,
                     shape.vocab, train_head=options.train_vocabulary, layers=len(kept_layers(options, shape.layers)),
                     tables=1 if config.get("tie_word_embeddings") else 2)
