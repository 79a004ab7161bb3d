"""The files beside exported weights that start an engine: SERVE.md, serve.sh, a TensorRT-LLM YAML, Dynamo workers.

Source: formats.md sections 1 and 4 (serving); TensorRT-LLM `Eagle3DecodingConfig` (1.3); NVIDIA Dynamo
`examples/backends/vllm/launch/{agg_spec_decoding,disagg}.sh` and `deploy/v1beta1/{agg,disagg}.yaml` (1.3).
Everything is made from plain values by a serialiser or quoted: no name of a target or folder is read by a shell.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drafters.export.engines import ENGINES, method_of, serving, since
from drafters.export.kinds import kind_of
from drafters.export.native import engine_layer_ids

UNNAMED = "TARGET"  # stands for a target that only this machine has under its name
HERE = "PATH"  # stands for the folder of an export
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILES = ("SERVE.md", "serve.sh", "tensorrt-llm.yaml", "dynamo-aggregated.yaml", "dynamo-disaggregated.yaml")
IMAGE = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.3.1"
THEIR_HEADS = 5  # that the Medusa repository's newer loader makes, whatever config.json says
TRANSFER = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'


@dataclass(frozen=True)
class Deployment:
    """What the files say. drafter: folder or Hub id that engines are told; `keys`: config.json under native names."""

    target: str
    drafter: str
    layout: str
    keys: dict[str, Any]
    target_layers: int | None
    drafted: int

    @property
    def refusals(self) -> dict[str, list[str]]:
        """Each engine's reasons not to serve this drafter, empty for those that do."""
        return serving(self.layout, self.keys, self.target_layers)

    @property
    def parallel(self) -> bool:
        """Whether the drafter gives all its tokens in one pass."""
        return kind_of(self.keys).name == "parallel"


def on_the_hub(name: str) -> bool:
    """Whether a name is a Hub id, and no folder of this machine."""
    return bool(HUB_ID.fullmatch(name)) and not Path(name).exists()


def target_reference(model: str) -> str:
    """A Hub id as it is; UNNAMED for a folder of this machine or an embedded target."""
    return model if on_the_hub(model) else UNNAMED


def speculation(drafter: str, drafted: int, method: str = "eagle3", parallel: bool = False) -> dict[str, Any]:
    """vLLM's `speculative_config`. parallel: all tokens in one pass; without it vLLM would draft token by token, and
    skip the learned state with a warning. A draft_model is shared among the target's GPUs, as vLLM wants it."""
    shared = {} if method == "draft_model" else {"draft_tensor_parallel_size": 1}
    return {"method": method, "model": drafter, "num_speculative_tokens": drafted} | shared | (
        {"parallel_drafting": True} if parallel else {})


def speculative_config(deployment: Deployment) -> str:
    """vLLM's `--speculative-config`, which Dynamo's vLLM backend takes too."""
    return json.dumps(speculation(deployment.drafter, deployment.drafted, method_of(deployment.layout),
                                  deployment.parallel))


def serving_files(deployment: Deployment) -> dict[str, str]:
    """Name -> content of the files for every engine that can serve the drafter."""
    served = [name for name, reasons in deployment.refusals.items() if not reasons]
    files = {"SERVE.md": serve_text(deployment), "serve.sh": serve_script(deployment)}
    if "tensorrt-llm" in served:
        files["tensorrt-llm.yaml"] = tensorrt_yaml(deployment)
    if "vllm" in served:
        files["dynamo-aggregated.yaml"] = dynamo_yaml(deployment, {"VllmWorker": ("worker", [])})
        files["dynamo-disaggregated.yaml"] = dynamo_yaml(deployment, {
            "VllmDecodeWorker": ("decode", ["--disaggregation-mode", "decode", "--kv-transfer-config", TRANSFER]),
            "VllmPrefillWorker": ("prefill", ["--disaggregation-mode", "prefill", "--kv-transfer-config", TRANSFER])})
    return files


def tensorrt_settings(deployment: Deployment) -> dict[str, Any]:
    """`speculative_config` of TensorRT-LLM; its layer ids count the OUTPUT of a layer."""
    taps = deployment.keys["eagle_aux_hidden_state_layer_ids"]
    return {"decoding_type": "Eagle3", "max_draft_len": deployment.drafted, "speculative_model": deployment.drafter,
            "eagle3_layers_to_capture": engine_layer_ids(taps)["output_of"]}


def tensorrt_yaml(deployment: Deployment) -> str:
    note = ("# trtllm-serve TARGET --extra_llm_api_options tensorrt-llm.yaml\n"
            "# Older releases call these keys decoding_type: Eagle and speculative_model_dir.\n")
    return note + yaml.safe_dump({"speculative_config": tensorrt_settings(deployment)}, sort_keys=False)


def dynamo_yaml(deployment: Deployment, workers: dict[str, tuple[str, list[str]]]) -> str:
    """A DynamoGraphDeployment with the vLLM backend. Workers of a split deployment have the same speculative config:
    the cache that they hand over holds the drafter's keys too."""
    def component(name: str, kind: str, container: dict[str, Any]) -> dict[str, Any]:
        return {"name": name, "type": kind, "replicas": 1,
                "podTemplate": {"spec": {"containers": [{"name": "main", "image": IMAGE, **container}]}}}

    arguments = ["--model", deployment.target, "--speculative-config", speculative_config(deployment)]
    components = [component("Frontend", "frontend", {})]
    for name, (kind, more) in workers.items():
        components.append(component(name, kind, {
            "command": ["python3", "-m", "dynamo.vllm"], "args": [*arguments, *more],
            "resources": {"limits": {"nvidia.com/gpu": "1"}}}))
    graph = {"apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeployment",
             "metadata": {"name": "drafthouse-vllm"}, "spec": {"components": components}}
    note = (f"# Every worker must reach {deployment.drafter} (a Hub id, or a folder mounted in its pod) and the target;"
            " set the image to your Dynamo release.\n")
    return note + yaml.safe_dump(graph, sort_keys=False, width=1000)


SCRIPT = r"""#!/usr/bin/env bash
# Serves this drafter with its target, without a container.
# usage: serve.sh ENGINE [TARGET] [further options of the engine ...]
# ENGINE: vllm, sglang, tensorrt-llm, dynamo, dynamo-disaggregated
set -euo pipefail
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
target={target}
drafted={drafted}
engine=${{1:-}}
shift || true
if [ $# -gt 0 ] && [ "${{1#-}}" = "$1" ]; then target=$1; shift; fi
if [ "$target" = {unnamed} ]; then
  echo "serve.sh: name the target that the drafter was trained for: serve.sh ENGINE TARGET" >&2; exit 2
fi
speculative() {{
  python3 -c 'import json, sys
print(json.dumps({{"method": "{method}", "model": sys.argv[1], "num_speculative_tokens": int(sys.argv[2]),
                  {more}}}))' "$here" "$drafted"
}}
refuse() {{ echo "serve.sh: not with this drafter: $1" >&2; exit 2; }}
case "$engine" in
{cases}
  *) echo "usage: serve.sh vllm|sglang|tensorrt-llm|dynamo|dynamo-disaggregated [TARGET] [options ...]" >&2; exit 2 ;;
esac
"""
CASES = {
    "vllm": r"""    exec python3 -m vllm.entrypoints.openai.api_server --model "$target" \
      --speculative-config "$(speculative)" "$@" ;;""",
    "sglang": r"""    exec python3 -m sglang.launch_server --model-path "$target" --speculative-algorithm EAGLE3 \
      --speculative-draft-model-path "$here" --speculative-num-steps "$drafted" --speculative-eagle-topk 1 \
      --speculative-num-draft-tokens "$((drafted + 1))" "$@" ;;""",
    "tensorrt-llm": r"""    options=$(mktemp --suffix .yaml)
    python3 -c 'import json, sys
settings = json.loads(sys.argv[2])
settings["speculative_model"] = sys.argv[1]
print(json.dumps({{"speculative_config": settings}}))' "$here" {tensorrt} > "$options"
    exec trtllm-serve "$target" --extra_llm_api_options "$options" "$@" ;;""",
    "dynamo": r"""    trap 'kill 0' EXIT
    python3 -m dynamo.frontend &
    python3 -m dynamo.vllm --model "$target" --speculative-config "$(speculative)" "$@" ;;""",
    "dynamo-disaggregated": r"""    trap 'kill 0' EXIT
    transfer={transfer}
    python3 -m dynamo.frontend &
    DYN_SYSTEM_PORT=8082 VLLM_NIXL_SIDE_CHANNEL_PORT=20097 CUDA_VISIBLE_DEVICES=1 python3 -m dynamo.vllm \
      --model "$target" --speculative-config "$(speculative)" --disaggregation-mode prefill \
      --kv-transfer-config "$transfer" "$@" &
    DYN_SYSTEM_PORT=8081 CUDA_VISIBLE_DEVICES=0 python3 -m dynamo.vllm \
      --model "$target" --speculative-config "$(speculative)" --disaggregation-mode decode \
      --kv-transfer-config "$transfer" "$@" ;;""",
}
BASE = {"dynamo": "vllm", "dynamo-disaggregated": "vllm"}  # whose loader a launcher uses


def serve_script(deployment: Deployment) -> str:
    """serve.sh. The drafter is the folder that the script lies in."""
    refusals = deployment.refusals
    settings = "" if refusals["tensorrt-llm"] else shlex.quote(json.dumps(tensorrt_settings(deployment)))
    cases = []
    for name, body in CASES.items():
        reasons = refusals[BASE.get(name, name)]
        text = f"    refuse {shlex.quote('; '.join(reasons))} ;;" if reasons else body.format(
            tensorrt=settings, transfer=shlex.quote(TRANSFER))
        cases.append(f"  {name})\n{text}")
    told = speculation("", 1, method_of(deployment.layout), deployment.parallel)
    further = "".join(f"{json.dumps(key)}: {value!r}, " for key, value in told.items()
                      if key not in ("method", "model", "num_speculative_tokens"))
    return SCRIPT.format(target=shlex.quote(deployment.target), unnamed=UNNAMED, drafted=int(deployment.drafted),
                         more=further, method=method_of(deployment.layout), cases="\n".join(cases))


SERVE = """# Serving this drafter

Target: `{target}`. It was trained on exactly this model: another one, or a fine-tuned one, lowers acceptance.
{named}{drafted} tokens are drafted a cycle; {most} needs no new export.
`bash serve.sh ENGINE{argument}` starts an engine that is installed, with the folder of serve.sh as the drafter.
"""
OTHERS = """
## Other engines

Not with this drafter: an engine would refuse it, or load it without a message and accept far fewer tokens.

"""
REPOSITORY = """
## TensorRT-LLM's converter, and the Medusa repository

The Medusa converter of TensorRT-LLM reads medusa_lm_head.safetensors (the state of the repository's `medusa_head`)
where no medusa_lm_head.pt lies beside it; tell it the number of heads.

The repository's own loader reads config.json and medusa_lm_head.pt alone. Make that in a copy of this folder: here
Drafthouse would refuse a second file of weights.

    python -c "import torch; from safetensors.torch import load_file; \\
    torch.save(load_file('medusa_lm_head.safetensors'), 'medusa_lm_head.pt')"

Its newer loader makes {made} heads whatever config.json says; this drafter has {heads}. Neither was run with this
folder.
"""
HEADINGS = {
    "vllm": """
## vLLM

    vllm serve {target} --speculative-config {config}
{own}
NVIDIA Dynamo has the same config on its vLLM backend: dynamo-aggregated.yaml, and dynamo-disaggregated.yaml for
separate prefill and decode workers.
""",
    "sglang": """
## SGLang

    python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 \\
      --speculative-draft-model-path {drafter} --speculative-num-steps {drafted} --speculative-eagle-topk 1 \\
      --speculative-num-draft-tokens {verified}
""",
    "tensorrt-llm": """
## TensorRT-LLM

    trtllm-serve {target} --extra_llm_api_options tensorrt-llm.yaml
""",
}


def serve_text(deployment: Deployment) -> str:
    """SERVE.md: the commands for the engines that serve this drafter, and why others would not."""
    target, drafted = shlex.quote(deployment.target), deployment.drafted
    unnamed = deployment.target == UNNAMED
    here = deployment.drafter == HERE
    heads = deployment.keys.get("heads")  # a token more than heads would come from one that was never trained
    most = f"another number up to {heads}, one for each head," if heads else "another number"
    text = SERVE.format(target=deployment.target, drafted=drafted, most=most, argument=f" {UNNAMED}" if unnamed else "",
                        named=(f"{UNNAMED} stands for its folder. " * unnamed + f"{HERE} is this folder. " * here))
    own = ""
    if deployment.layout == "speculators" and not (unnamed or deployment.parallel):
        own = f"\nor, the target being named in config.json:\n\n    vllm serve {shlex.quote(deployment.drafter)}\n"
    refused = []
    for name, reasons in deployment.refusals.items():
        if reasons:
            refused += reasons
            continue
        text += HEADINGS[name].format(target=target, drafted=drafted, verified=drafted + 1, own=own,
                                      drafter=shlex.quote(deployment.drafter),
                                      config=shlex.quote(speculative_config(deployment)))
        if recent := since(name, deployment.keys):
            text += f"\nNeeds a version of {ENGINES[name].title} that has {'; '.join(recent)}.\n"
    if deployment.layout == "medusa-original":
        text += REPOSITORY.format(made=THEIR_HEADS, heads=heads)
    if refused:
        text += OTHERS + "".join(f"- {reason}\n" for reason in refused)
    return text
