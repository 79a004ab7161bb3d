"""What `make roi ARGS=plan` prints: the table that an engineer checks, curves, choices, sentences, notes."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eval import roi_page
from eval.roi_worth import shown


def show(found: dict[str, Any], console: Console) -> None:
    """The table that an engineer checks, then the sentences."""
    table = Table("method", "batch", "K", "acceptance", "tokens/s", "ms a token", "p99", "GB a GPU", "$/M full",
                  "GPUs", "$/M at demand", title=escape(f"{found['target']} on {found['tensor_parallel']} x "
                                                        f"{found['hardware']} a replica"))
    for row in roi_page.table_rows(found):
        at = row["demand"] or {}
        table.add_row(escape(shown(row["name"])), str(row["batch"]), str(row["K"] or ""),
                      f"{row['kept']:.2f}" if row["K"] else "",
                      f"{row['tok_s']:,.0f}", f"{row['ms']:.2f}",
                      "not said" if row["ms_p99"] is None else f"{row['ms_p99']:.2f}", f"{row['memory'] / 1e9:.1f}",
                      f"{row['full_load']:.3f}" if row["full_load"] else "", str(at.get("gpus", "")),
                      f"{at['dollars_per_million']:.3f}" if "dollars_per_million" in at else "")
    console.print(table)
    for name, curve in found["curves"].items():
        for row in curve:
            print(f"{name:16} batch {row['batch']:4}  K {row['K']}  speedup {row['speedup']:.2f}  "
                  f"(90 % {row['low']:.2f} to {row['high']:.2f})")
    for line in [*choices(found), *found["prose"], *(f"note: {n}" for n in found["notes"])]:
        print(line)


def choices(found: dict[str, Any]) -> list[str]:
    """The best method at each batch of a replica and at each load of the cluster."""
    said = []
    for row in found["choice"]:
        batches = f"{row['from']} to {row['to']}" if row["to"] != row["from"] else f"{row['from']}"
        said.append(f"best at batch {batches}: {shown(row['method'])}" + (f", K {row['K']}" if row["K"] else "")
                    + ("" if row["keeps_slo"] else "; misses the SLO")
                    + (f" (not looked at: {', '.join(row['left_out'])})" if row["left_out"] else ""))
    for row in found["choice_by_load"]:
        gpus = f"{row['gpus']} to {row['gpus_to']}" if row["gpus_to"] != row["gpus"] else f"{row['gpus']}"
        said.append(f"best for {row['from']:,.0f} to {row['to']:,.0f} tokens/s: {shown(row['method'])}, "
                    f"{gpus} GPUs")
    return said
