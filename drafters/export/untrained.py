"""What vLLM is told to draft as a drafter without training does here: no files of weights, a config and its limits.

Source: vLLM 0.32, `vllm/config/speculative.py`, `vllm/v1/spec_decode/ngram_proposer.py` and `suffix_decoding.py`;
formats.md section 6. Pure functions.
"""

import json
import shlex
from collections.abc import Callable
from typing import Any

from drafters.export.serving import target_reference
from drafters.registry import options_of

CONFIG = "speculative-config.json"
Served = tuple[dict[str, Any], list[str]]  # the config, and in which points vLLM drafts otherwise


def lookup(options: Any, K: int) -> Served:
    apart = []
    if options.match == "latest":
        apart.append("vLLM's ngram continues the first occurrence of the longest match, not the latest: give every "
                     "stage `--drafter.options.match first`, `make eval` before the others.")
    return {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": options.shortest,
            "prompt_lookup_max": options.longest}, apart


def suffix(options: Any, K: int) -> Served:
    """suffix_decoding_max_tree_depth bounds match and draft together; the cache of earlier outputs is counted in
    requests."""
    growing = options.grow and options.corpus_tokens > 0
    config = {"method": "suffix", "num_speculative_tokens": K,
              "suffix_decoding_max_tree_depth": options.longest + min(K, int(options.factor * options.longest + 1e-6)),
              "suffix_decoding_max_spec_factor": options.factor,
              "suffix_decoding_min_token_prob": options.min_probability}
    config |= {} if growing else {"suffix_decoding_max_cached_requests": 0}
    apart = ["vLLM needs the package arctic-inference for this method, which pip builds from source."]
    if growing:
        apart.append("vLLM keeps its last 10,000 requests whatever their length, unfinished ones too "
                     "(suffix_decoding_max_cached_requests).")
        if not options.repeats:
            apart.append("vLLM drafts from an earlier answer to the very same prompt too: `--drafter.options.repeats "
                         "true`.")
    if options.outputs and options.corpus_tokens:
        apart.append("vLLM begins without earlier outputs: those of drafter.options.outputs are not served.")
    if options.shortest > 1:
        apart.append(f"vLLM drafts behind a match of one token too, not of {options.shortest} or more.")
    return config, apart


METHODS: dict[str, Callable[[Any, int], Served]] = {"lookup": lookup, "suffix": suffix}


def serving_config(kind: str, options: dict[str, Any], K: int) -> Served:
    """vLLM's `--speculative-config` for a drafter of METHODS with these `drafter.options` and chains of K tokens."""
    return METHODS[kind](options_of(kind, options), K)


def serving_files(kind: str, options: dict[str, Any], K: int, model: str) -> dict[str, str]:
    """Name -> content. model: `target.model` of the recipe."""
    config, apart = serving_config(kind, options, K)
    text = json.dumps(config)
    serve = (f"# Serving with drafter.kind {kind}\n\nNothing is trained, and nothing of a drafter is loaded:\n\n"
             f"    vllm serve {shlex.quote(target_reference(model))} --speculative-config {shlex.quote(text)}\n")
    if apart:
        serve += "\nWhere vLLM drafts otherwise than `make eval` measured:\n\n" + "".join(f"- {one}\n" for one in apart)
    return {CONFIG: text + "\n", "SERVE.md": serve}
