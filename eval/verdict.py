"""The verdict: deploy, deploy within a range, or do not deploy, with the reasons; never from the mean alone."""

from typing import Any

SAMPLING_ALPHA = 1e-3
FEWEST_TIMED = 5  # prompts; an interval from fewer says nothing


def decide(total: dict[str, Any], sets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Judges measured speed per batch size, losslessness and each prompt kind.

    A batch size that is slower than plain decoding limits the range, whatever the acceptance length (case 23).
    """
    greedy, sampling, speed = total["lossless"]["greedy"], total["lossless"]["sampling"], total["speed"]
    if greedy["mismatches"]:
        return verdict("do not deploy", None, [f"{greedy['mismatches']} of {greedy['prompts']} greedy answers differ "
                                               "from plain decoding"])
    if sampling["tests"] and sampling["p_value"] < SAMPLING_ALPHA:
        return verdict("do not deploy", None, [f"sampled tokens do not follow the target's distribution "
                                               f"(p = {sampling['p_value']:.2g})"])
    low, high = speed["ci95"]
    measured = (f"measured speedup at batch 1 is {speed['speedup']:.2f} (95 % interval {low:.2f} to {high:.2f}, "
                f"{speed['prompts']} prompts)")
    if speed["prompts"] < FEWEST_TIMED:
        return verdict("do not deploy", None, [f"{measured}: fewer than {FEWEST_TIMED} prompts were timed"])
    if low <= 1.0:
        return verdict("do not deploy", None, [f"{measured}: not shown to be faster than {speed['baseline_engine']}"])
    reasons = [measured]
    slow = sorted(row["batch"] for row in speed["by_batch"] if row["speedup"] < 1.0)
    weak = [kind for kind, s in sets.items() if s["tokens_per_target_pass"] < total["tokens_per_target_pass"] * 0.85]
    if weak:
        reasons.append(f"clearly weaker on {', '.join(weak)}")
    sizes = sorted(row["batch"] for row in speed["by_batch"] if not slow or row["batch"] < slow[0])
    if slow:
        reasons.append(f"slower than plain decoding at batch {slow[0]}")
    if not sizes:
        return verdict("do not deploy", None, reasons)
    limit = f"batch {sizes[0]}" if len(sizes) == 1 else f"batch {sizes[0]} to {sizes[-1]}"
    if slow or len(speed["by_batch"]) == 1:
        reasons.append("larger batches lose or were not measured")
        return verdict(f"deploy within {limit}", limit, reasons)
    return verdict("deploy", None, reasons)


def verdict(decision: str, limit: str | None, reasons: list[str]) -> dict[str, Any]:
    return {"decision": decision, "range": limit, "reasons": reasons}
