"""The verdict: deploy, deploy within a range, or do not deploy, with the reasons; never from the mean alone."""

from typing import Any

SAMPLING_ALPHA = 1e-3
NEAR_TIES = 0.01  # share of the compared answers; rounding alone explains no more
FEWEST_TIMED = 5  # prompts; an interval from fewer says nothing
FEWEST_DRAFTS = 30  # of a context bucket that is judged
CLIFF = 0.5  # share of the accepted tokens a draft in shorter contexts below which longer ones are left out


def kinds(sets: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The blocks by prompt kind: a set's categories where it has several, else the set."""
    found = {}
    for name, block in sets.items():
        categories = block.get("categories", {})
        if len(categories) < 2:
            found[name] = block
        for category, numbers in categories.items() if len(categories) > 1 else ():
            found[category if len(sets) == 1 else f"{name}: {category}"] = numbers
    return found


def cliff(buckets: list[dict[str, Any]]) -> tuple[int, float, float] | None:
    """(context, mean length below it, from it on) where acceptance breaks down with the context (case 33)."""
    drafts, accepted = 0, 0.0
    for bucket in buckets:
        gained = bucket["mean_length"] - 1
        if drafts >= FEWEST_DRAFTS and bucket["drafts"] >= FEWEST_DRAFTS and gained < CLIFF * accepted / drafts:
            return bucket["from"], 1 + accepted / drafts, bucket["mean_length"]
        drafts, accepted = drafts + bucket["drafts"], accepted + bucket["drafts"] * gained
    return None


def lossless_fault(total: dict[str, Any]) -> str:
    """Why the drafter must not be served whatever its speed: it changes greedy text or the distribution of sampled
    tokens. Empty where nothing shows that; verdict, exit code and `make publish` all ask here."""
    greedy, sampling = total["lossless"]["greedy"], total["lossless"]["sampling"]
    found = []
    if greedy["mismatches"]:
        found.append(f"{greedy['mismatches']} of {greedy['prompts']} greedy answers differ from plain decoding")
    if greedy["near_ties"] > NEAR_TIES * greedy["prompts"]:
        found.append(f"{greedy['near_ties']} near-tie{'s' if greedy['near_ties'] > 1 else ''} in {greedy['prompts']} "
                     f"greedy answers, more than {100 * NEAR_TIES:g} %")
    if sampling["tests"] and sampling["p_value"] < SAMPLING_ALPHA:
        found.append(f"sampled tokens do not follow the target's distribution (p = {sampling['p_value']:.2g})")
    return "; ".join(found)


def decide(total: dict[str, Any], sets: dict[str, dict[str, Any]], lossy: bool = False, settings: str = "",
           ) -> dict[str, Any]:
    """Judges measured speed per batch size, losslessness, each prompt kind and each context length. settings: at which
    all of that was measured, in words, for the last reason.

    A batch size that is slower than plain decoding limits the range, whatever the acceptance length (case 23); so does
    a context length from which acceptance breaks down (case 33). Prompts without the chat template decide nothing
    (case 53). lossy: the figures are of a rule that changes the text, which nothing here judges.
    """
    return at_settings(judged(total, sets, lossy), settings)


def at_settings(found: dict[str, Any], settings: str) -> dict[str, Any]:
    """The verdict with what it holds for."""
    if settings:
        found["reasons"].append(f"measured at {settings}; requests at other settings accept otherwise")
    return found


def judged(total: dict[str, Any], sets: dict[str, dict[str, Any]], lossy: bool) -> dict[str, Any]:
    fault, speed = lossless_fault(total), total["speed"]
    if lossy:
        said = ("LOSSY: typical acceptance accepts tokens that the target would not have given; what that does to the "
                "answers was not judged")
        return verdict("do not deploy", None, [said, fault] if fault else [said])
    raw = sum(s.get("untemplated", 0) for s in sets.values())
    if raw:
        return verdict("do not deploy", None, [f"{raw} prompts are token ids that do not end as the chat template "
                                               "does; figures with them say nothing of chat requests"])
    if fault:
        return verdict("do not deploy", None, [fault])
    low, high = speed["ci95"]
    measured = (f"measured speedup at batch 1 is {speed['speedup']:.2f} (95 % interval {low:.2f} to {high:.2f}, "
                f"{speed['prompts']} prompts)")
    if speed["prompts"] < FEWEST_TIMED:
        return verdict("do not deploy", None, [f"{measured}: fewer than {FEWEST_TIMED} prompts were timed"])
    if low <= 1.0:
        return verdict("do not deploy", None, [f"{measured}: not shown to be faster than {speed['baseline_engine']}"])
    reasons = [measured]
    slow = sorted(row["batch"] for row in speed["by_batch"] if row["speedup"] < 1.0)
    bound = 0.85 * total["tokens_per_target_pass"]
    weak = [kind for kind, s in kinds(sets).items() if s["tokens_per_target_pass"] < bound]
    if weak:
        reasons.append(f"clearly weaker on {', '.join(weak)}")
    sizes = sorted(row["batch"] for row in speed["by_batch"] if not slow or row["batch"] < slow[0])
    if slow:
        reasons.append(f"slower than plain decoding at batch {slow[0]}")
    if not sizes:
        return verdict("do not deploy", None, reasons)
    limit = f"batch {sizes[0]}" if len(sizes) == 1 else f"batch {sizes[0]} to {sizes[-1]}"
    fall = cliff(total["acceptance"].get("by_context_bucket", []))
    if fall:
        limit += f" and contexts below {fall[0]:,} tokens"
        reasons.append(f"mean acceptance length falls from {fall[1]:.2f} to {fall[2]:.2f} beyond {fall[0]:,} tokens of "
                       "context")
    thin = [row["batch"] for row in speed["by_batch"] if row.get("prompts", row["batch"]) < row["batch"]]
    if thin:
        reasons.append(f"batch {', '.join(map(str, thin))} was timed with {speed['prompts']} prompts repeated")
    if slow or len(speed["by_batch"]) == 1:
        reasons.append("larger batches lose or were not measured")
    if slow or fall or len(speed["by_batch"]) == 1:
        return verdict(f"deploy within {limit}", limit, reasons)
    return verdict("deploy", None, reasons)


def decide_server(total: dict[str, Any], sets: dict[str, dict[str, Any]], server: dict[str, Any], settings: str = "",
                  ) -> dict[str, Any]:
    """Judges a running server: losslessness, then every concurrency by the whole interval of its speedup (case 23).
    settings: as in `decide`.

    What other clients disturbed, and what has no baseline, decides nothing.
    """
    return at_settings(judged_server(total, sets, server), settings)


def judged_server(total: dict[str, Any], sets: dict[str, dict[str, Any]], server: dict[str, Any]) -> dict[str, Any]:
    levels, baseline, greedy = list(server["levels"].values()), server["baseline"], total["lossless"]["greedy"]
    if baseline["from"] is None:
        return verdict("do not deploy", None, [f"nothing shows that this server is faster: {baseline['reason']}"])
    if server["drafting"] is False:
        return verdict("do not deploy", None, ["the server's counters show no draft: it runs without a drafter"])
    strange = [one["concurrency"] for one in levels if one["foreign"]]
    if strange or server["restless"]:
        where = f" at concurrency {', '.join(map(str, strange))}" if strange else ""
        return verdict("do not deploy", None, [f"other clients used the server while it was measured{where}: its "
                                               "figures are not of these prompts alone; measure again"])
    if greedy["mismatches"]:
        unknown = server["greedy"]["gap_unknown"]
        return verdict("do not deploy", None, [
            f"{greedy['mismatches']} of {greedy['prompts']} greedy answers differ from the server's without a drafter "
            f"beyond a near-tie of {greedy['tie_gap']:g} (eval.gap_tolerance), {unknown} of unknown gap"])
    paired = [one for one in levels if one["speedup"] is not None]
    if not paired or paired[0]["prompts"] < FEWEST_TIMED:
        return verdict("do not deploy", None, [f"fewer than {FEWEST_TIMED} conversations were answered by both"])
    faster: list[dict[str, Any]] = []
    for one in paired:
        if one["ci95"][0] <= 1.0:
            break
        faster.append(one)
    reasons = [f"measured speedup at concurrency {one['concurrency']} is {one['speedup']:.2f} (95 % interval "
               f"{one['ci95'][0]:.2f} to {one['ci95'][1]:.2f}, {one['prompts']} conversations)" for one in paired]
    reasons += [baseline["reason"]] if baseline["reason"] else []
    if total["acceptance"]["mean_length"] is None:
        reasons.append(f"the server says nothing of acceptance: {server['counters'] or 'it counts no drafts'}")
    if not faster:
        return verdict("do not deploy", None, [*reasons, "not shown to be faster than without a drafter"])
    bound = 0.85 * (total["acceptance"]["mean_length"] or 0.0)
    weak = [kind for kind, one in kinds(sets).items() if (one["acceptance"]["mean_length"] or bound) < bound]
    if weak:
        reasons.append(f"clearly weaker on {', '.join(weak)}")
    if len(faster) == len(levels) > 1:
        return verdict("deploy", None, reasons)
    ends = [faster[0]["concurrency"], faster[-1]["concurrency"]]
    limit = f"concurrency {ends[0]}" if len(faster) == 1 else f"concurrency {ends[0]} to {ends[1]}"
    reasons.append("larger loads lose, are not shown to gain, or were not measured")
    return verdict(f"deploy within {limit}", limit, reasons)


def verdict(decision: str, limit: str | None, reasons: list[str]) -> dict[str, Any]:
    return {"decision": decision, "range": limit, "reasons": reasons}
