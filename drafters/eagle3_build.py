"""What the registry calls for drafter.kind eagle3: a fresh drafter for a target, and one from a checkpoint's parts.
Kinds with the same layers are built by the same two functions.

Legend: H hidden, D draft vocabulary.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from drafters import vocab
from drafters.eagle3 import Eagle3, Options, Shared
from drafters.export.check import ROPE_NEEDS
from drafters.export.foreign import check_tensors
from drafters.export.foreign_values import rope_of
from drafters.export.kinds import KINDS
from drafters.layers import Shape
from drafters.placement import weight_of
from recipes.draft_cost import DraftSize
from recipes.errors import ConfigError
from recipes.model_shape import ModelShape

# Acceptance lengths that `make plan` takes for the worst and the best case, and why these.
EXPECTED_LENGTHS = ((1.3, 3.0), "a good EAGLE-3 chain to an early drafter on few tokens")
Built = TypeVar("Built", bound=Eagle3)


def build(options: Options, target: Any, counts: dict[int, int], seed: int) -> Eagle3:
    """A fresh drafter for a loaded target (drafters.target.Target with taps); see `fresh`."""
    return fresh(Eagle3, options, target, counts, seed)


def fresh(kind: type[Built], options: Shared, target: Any, counts: dict[int, int], seed: int) -> Built:
    """A drafter of this kind with its vocabulary, sizes and first weights.

    Raises ConfigError for rotary settings that no export can state: nobody is to train what cannot be served.
    """
    rotary = target.config.rope_parameters.get("rope_type", "default")
    if rotary not in ROPE_NEEDS:
        raise ConfigError(f"target.model = {target.section.model}: rope_type = {rotary!r}: engines load drafters with "
                          f"{', '.join(ROPE_NEEDS)} alone")
    ids = vocab.build(counts, options.draft_vocab_size, target.vocab_size, vocab.forced(target))
    torch.manual_seed(seed)
    shape = Shape.from_target(target.config, options.draft_vocab_size, options.intermediate_size)
    drafter = kind(options, shape, target.layers, ids, target.embedding.clone(), target.head_weight.clone())
    with torch.no_grad():
        initialise(drafter)
        if options.start == "target_layer":
            copy_last_layers(drafter, target)
    return drafter


def load(options: Options, shape: dict[str, Any], layers: list[int], tensors: dict[str, Tensor],
         target: Any) -> Eagle3:
    """A drafter from a checkpoint's parts, on a loaded target; see `restored`."""
    return restored(Eagle3, options, shape, layers, tensors, target)


def restored(kind: type[Built], options: Shared, shape: dict[str, Any], layers: list[int],
             tensors: dict[str, Tensor], target: Any) -> Built:
    """A drafter of this kind from a checkpoint's parts.

    Raises ConfigError where tensors are missing, unexpected, of another shape or number of layers, or for another
    vocabulary.
    """
    own = Shape.read(shape)
    rope_of(shape, 0.0, [], "shape: ")
    if own.vocab_size != target.vocab_size or own.target_hidden_size != target.hidden:
        raise ConfigError(f"the drafter is for a target with vocabulary {own.vocab_size} and hidden size "
                          f"{own.target_hidden_size}; this target has {target.vocab_size} and {target.hidden}")
    rest = dict(tensors)
    try:
        d2t, t2d = rest.pop("d2t"), rest.pop("t2d")
    except KeyError as error:
        raise ConfigError(f"the checkpoint has no {error.args[0]} tensor") from None
    if (list(d2t.shape), list(t2d.shape)) != ([own.draft_vocab_size], [own.vocab_size]) or d2t.is_floating_point():
        raise ConfigError(f"tensors d2t {list(d2t.shape)} and t2d {list(t2d.shape)}: draft_vocab_size = "
                          f"{own.draft_vocab_size} and vocab_size = {own.vocab_size} imply others")
    vocab.check(d2t, t2d)
    depth = 1 + len({name.split(".")[1] for name in rest if name.startswith("layers.")})
    if depth != options.num_layers:
        raise ConfigError(f"the checkpoint has tensors of {depth} decoder layer(s), but options.num_layers = "
                          f"{options.num_layers}; restore its drafter.json and drafter.safetensors")
    # Before anything of the stated sizes is allocated.
    check_tensors(rest, None, shape, options.tap_norms, "own", layers, options.num_layers, KINDS[kind.kind],
                  stored=True)
    drafter = kind(options, own, layers, vocab.ids_of(d2t), target.embedding.clone(), target.head_weight.clone())
    drafter.load_state_dict(rest)
    return drafter


def cost(options: Options, shape: ModelShape, config: dict[str, Any], taps: int) -> DraftSize:
    """Sizes of the drafter for a target of this shape and text config, for `make plan`."""
    heads = config["num_attention_heads"]
    return DraftSize(shape.hidden, shape.hidden, taps, heads, config.get("num_key_value_heads") or heads,
                     config.get("head_dim") or shape.hidden // heads,
                     options.intermediate_size or config["intermediate_size"], options.draft_vocab_size, shape.vocab,
                     options.tap_norms, options.train_head, options.num_layers)


def initialise(drafter: Eagle3) -> None:
    """Random start: small normal matrices; the head starts as the target's rows of the draft vocabulary."""
    for weight in drafter.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.02)
    drafter.lm_head.weight.copy_(drafter.teacher_head)


def copy_last_layers(drafter: Eagle3, target: Any) -> None:
    """Warm start: the target's last layers in their order, its final norm, `fc` close to the identity on the last tap.

    The hidden half of the first layer's q, k and v takes the target's weights. What has no counterpart there, the
    embedding half and the other taps, starts at a twentieth of its random size: few traces never wash out the noise it
    would add. Raises ConfigError where the target has too few layers, or such of other sizes or names.
    """
    theirs, stack, H = target.model.get_decoder().layers, drafter.stack, drafter.shape.hidden_size
    if len(theirs) < len(stack):
        raise ConfigError(f"drafter.options.start = target_layer: drafter.options.num_layers = {len(stack)}, but the "
                          f"target has {len(theirs)} layers; use start: random")
    first = drafter.midlayer
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(first.self_attn, name).weight[:, :H].mul_(0.05)
    try:
        for own, layer in zip(stack, list(theirs)[-len(stack) :]):
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(own.self_attn, name).weight[:, -H:].copy_(weight_of(getattr(layer.self_attn, name)))
            own.self_attn.o_proj.weight.copy_(weight_of(layer.self_attn.o_proj))
            for name in ("gate_proj", "up_proj", "down_proj"):
                getattr(own.mlp, name).weight.copy_(weight_of(getattr(layer.mlp, name)))
            norm = first.hidden_norm if own is first else own.input_layernorm
            norm.weight.copy_(weight_of(layer.input_layernorm))
            own.post_attention_layernorm.weight.copy_(weight_of(layer.post_attention_layernorm))
        drafter.norm.weight.copy_(weight_of(target.model.get_decoder().norm))
    except (AttributeError, RuntimeError) as error:
        raise ConfigError(f"drafter.options.start = target_layer: the target's last layers do not fit "
                          f"({error}); use start: random") from None
    drafter.fc.weight.mul_(0.05)
    drafter.fc.weight[:, -H:].add_(torch.eye(H, device=drafter.fc.weight.device))
