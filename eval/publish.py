"""`make publish REPO=org/name`: uploads a checked export with a model card, provenance and the evaluation's numbers.

Run as `python -m eval.publish --config RECIPE --repo org/name`. runs/<name>/publish/<name of the repository>/ is
exactly what is uploaded; `--dry-run` ends there.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub import get_token

from data.prompts import BUILTIN
from data.reader import open_manifest
from drafters import checkpoint
from drafters.export.check import read_config
from drafters.export.engines import ENGINES
from drafters.export.layouts import LAYOUTS, layouts_of
from drafters.export.serving import Deployment, serving_files
from drafters.export.write import CONFIG, EXPORTED, ORIGIN, check_folder
from drafters.target import unloaded_fingerprint
from eval.card import CardFacts, check_report, model_card
from eval.licences import PRIVATE, data_terms, notices, problems, start_terms, target_terms
from eval.public import check_words, public_recipe, public_report
from eval.ship import CHECK, digests, evaluated_as, proven
from eval.upload import Uploader, check_endpoint
from eval.verdict import lossless_fault
from recipes.cli import Command, process, run_folder
from recipes.errors import ConfigError, RunError
from recipes.files import replacing, sha256_json, write_json, write_text
from recipes.schema import Recipe, opt

REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
CARD, REPORT, RECIPE, PROMPTS = "README.md", "evaluation.json", "recipe.yaml", "evaluation_prompts.jsonl"
OWNED = (*EXPORTED, CARD, REPORT, RECIPE, PROMPTS)  # all that a publication can hold
AGREE = 0.02  # of an acceptance per position, whatever export.tolerance was


@dataclass
class Options:
    """What `make publish` is told besides the recipe."""

    repo: str = opt("", "org/name on the Hub; make takes it as REPO=org/name")
    format: Literal["", "native", "speculators", "medusa", "medusa-original", "plain"] = opt(
        "", "the export that is published; empty is the first of export.formats")
    licence: str = opt("", "licence of the drafter; empty is the target's")
    base_model: str = opt("", "Hub model that a target in a local folder is, or was made from")
    target_licence: str = opt("", "licence of a target that does not state it, e.g. apache-2.0")
    data_licence: str = opt("", "licence of training prompts that do not state it; private: your own, not published")
    start_licence: str = opt("", "licence of the drafter of drafter.path or drafter.init_from where its card does not "
                                 "state it; private: your own, not published")
    endpoint: str = opt("https://huggingface.co", "the Hub, or a server that speaks its API")
    transfer: Literal["auto", "lfs"] = opt("auto", "lfs: Git LFS although Xet is installed, for servers without Xet")


def gate(report: dict[str, Any], despite_verdict: bool) -> list[str]:
    """Why these measurements forbid publishing, a sentence each."""
    total, verdict = report["total"], report["verdict"]
    fault = lossless_fault(total)
    found = [f"report.json: {fault}"] if fault else []
    if report["settings"].get("lossy"):
        found.append("report.json: of typical acceptance, which is lossy; evaluate with eval.acceptance: exact")
    if not total["lossless"]["greedy"]["prompts"]:
        found.append("report.json: no greedy answer was compared with plain decoding")
    if verdict["decision"] == "do not deploy" and not despite_verdict:
        found.append(f"report.json: verdict: do not deploy ({'; '.join(verdict['reasons'])}); --despite-verdict "
                     "publishes it with this verdict on its card")
    return found


def unproven(proof: Path, stored: dict[str, Any], trained: bool) -> list[str]:
    """Why this proof says nothing of acceptance: none was compared, or what was compared is apart. trained: by this
    run, so that validation's acceptance is known too (case 12)."""
    if "reader" not in stored:
        return [f"{proof}: was made with export.check false: no second reader has decoded with these files"]
    found, said = [], {"loop": (stored, len(stored["loop"]), 0.0)}
    if trained:
        if "validation" not in stored:
            return [f"{proof}: was made by an earlier version, which compared no validation; run `make export` again"]
        said["replay"] = stored["validation"], 1, 1 / max(1, stored["validation"]["drafts"])
    for name, (numbers, positions, more) in said.items():
        if not numbers.get("drafts"):
            found.append(f"{proof}: no draft was compared; set export.check_tokens to 2 or more, and run `make export` "
                         "again")
            continue
        apart = max(abs(a - b) for a, b in zip(numbers[name][:positions], numbers["reader"]))
        if not apart <= AGREE + more:
            found.append(f"{proof}: {name} and second reader are {apart:.3f} apart in acceptance, {AGREE + more:.3f} "
                         "are allowed; `make doctor` names the stage")
    return found


def layout_of(recipe: Recipe, given: str) -> str:
    """The layout that is published: the given one, or the first of export.formats. ConfigError, naming the field, for
    one that is none, or none of the recipe's kind of drafter."""
    if not given and not recipe.export.formats:
        raise ConfigError("export.formats = []: there is no export to publish; name a layout there, or give --format")
    layout, field = given or recipe.export.formats[0], "--format" if given else "export.formats[0]"
    own = layouts_of(recipe.drafter.kind)
    if layout not in own:
        raise ConfigError(f"{field} = {layout}: layouts of a drafter of kind {recipe.drafter.kind}: "
                          f"{', '.join(own) or 'none'}")
    return layout


class Publication:
    """One export of a run, and everything that has to agree before it leaves this machine."""

    def __init__(self, recipe: Recipe, options: Options, switches: set[str], token: str | None) -> None:
        if not REPO.fullmatch(options.repo) or ".." in options.repo or "--" in options.repo:
            raise ConfigError(f"REPO={options.repo!r}: must be org/name of letters, digits, dots, dashes, underscores")
        check_endpoint(options.endpoint)
        self.recipe, self.options, self.switches = recipe, options, switches
        self.run = run_folder(recipe)
        self.format = layout_of(recipe, options.format)
        self.source = self.run / "export" / self.format
        self.terms = target_terms(recipe.target.model, options.base_model, options.target_licence, options.endpoint,
                                  token)
        self.start = start_terms(recipe.drafter, options.start_licence, options.endpoint, token)
        itself = self.start is not None and self.start.itself
        self.data = [] if itself else data_terms(recipe.prompts, self.terms, options.data_licence)
        if self.start:
            self.data.append((f"{'this is' if itself else 'started from'} {self.start.what}", self.start.licence))
        known = self.start.licence if itself and self.start.licence != PRIVATE else self.terms.licence
        self.licence = options.licence or known
        self.report = self.read_report()

    def read_report(self) -> dict[str, Any]:
        path = self.run / "eval" / "report.json"
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ConfigError(f"{path}: no evaluation here; run `make eval` first") from None
        check_report(report)
        return report

    def check(self) -> None:
        """RunError with every reason not to publish: check, gate, fingerprints, terms (cases 12, 36, 47, 50)."""
        found = [*self.check_export(), *gate(self.report, "despite-verdict" in self.switches), *self.check_identity()]
        found += [*self.check_start(),
                  *(p for p in problems(self.options.repo, self.licence, self.terms, self.data, self.start)
                    if not ("terms-read" in self.switches and "--terms-read" in p))]
        if found:
            raise RunError("not published:\n" + "\n".join(f"  - {each}" for each in found))

    def check_export(self) -> list[str]:
        proof = self.run / "export" / f"{self.format}-{CHECK}"
        if not proven(proof, None, digests(self.source)):
            return [f"{self.source}: not what `make export` checked last; run it again, with {self.format} in "
                    "export.formats"]
        stored, found = json.loads(proof.read_text(encoding="utf-8")), []
        found += unproven(proof, stored, not self.recipe.drafter.path)
        for engine in self.recipe.export.engines:
            if self.format in ENGINES[engine].layouts:
                found += stored["engines"][engine]
        try:
            check_folder(self.source, self.format)
        except RunError as error:
            found.append(str(error))
        return found

    def check_identity(self) -> list[str]:
        """Export, evaluation, traces and the target as it is now must be of one target and one checkpoint."""
        origin, served = read_config(self.source / ORIGIN), unloaded_fingerprint(self.recipe.target)
        known = {"the export": origin["target"].get("fingerprint"),
                 "the evaluation": self.report["target"]["fingerprint"]}
        if not self.recipe.drafter.path:
            known["the traces"] = open_manifest(self.recipe.trace, self.run)["target"]
        found = []
        for what, fingerprint in known.items():
            differ = [key for key in served if (fingerprint or {}).get(key) != served[key]]
            if differ:
                found.append(f"target fingerprint: {what} was made with another target ({', '.join(differ)})")
        if not found and not evaluated_as(origin, self.report, self.recipe, self.run, served):
            found.append("eval/report.json: is not of this checkpoint, these prompts and settings; run `make export` "
                         "and `make eval`")
        return found

    def check_start(self) -> list[str]:
        """A drafter that was trained on from another one says so: that one's terms are part of its own (case 50)."""
        if self.recipe.drafter.path or self.recipe.drafter.init_from:
            return []
        path = checkpoint.best(self.run / "checkpoints") / "trainer.json"
        settings = read_config(path).get("settings") if path.is_file() else None
        if isinstance(settings, dict) and settings.get("init_from"):
            return [f"{path}: this drafter was started from another one; publish it with the recipe that it was "
                    "trained with, whose drafter.init_from names that one"]
        return []

    def stage(self) -> Path:
        """The exact folder that is uploaded."""
        name = self.options.repo.rpartition("/")[2]
        out = self.run / "publish" / name
        partial = out.with_name(f".{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            self.fill(partial)
            check_folder(partial, self.format)
            check_words(partial, self.recipe, self.run)
            shutil.rmtree(out, ignore_errors=True)
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return out

    def fill(self, folder: Path) -> None:
        layout = LAYOUTS[self.format]
        config, origin = read_config(self.source / CONFIG), read_config(self.source / ORIGIN)
        with replacing(folder / layout.weights) as f, open(self.source / layout.weights, "rb") as weights:
            shutil.copyfileobj(weights, f)
        named = self.terms.base_model
        origin["target"]["model"] = named
        if "drafthouse" in config:
            config["drafthouse"]["target"]["model"] = named
        if "base_model_name_or_path" in config:
            config["base_model_name_or_path"] = named
        if "speculators_config" in config:
            config["speculators_config"]["verifier"]["name_or_path"] = named
        write_json(folder / CONFIG, config)
        shown = "with-prompts" in self.switches
        report = public_report(self.report, self.recipe, named, shown)
        write_json(folder / ORIGIN, origin | {
            "target_origin": self.terms.origin, "licence": self.licence, "stack": report["stack"],
            "report_sha256": sha256_json(report), "data": self.data})
        deployment = Deployment(named, self.options.repo, self.format, layout.flat(config),
                                origin["target_layers"], self.report["settings"]["draft_length"])
        files = serving_files(deployment)
        for file, text in files.items():
            write_text(folder / file, text)
        write_json(folder / REPORT, report)
        recipe = yaml.safe_dump(public_recipe(self.recipe, named, shown), sort_keys=False, allow_unicode=True)
        write_text(folder / RECIPE, recipe)
        if shown:
            if self.recipe.eval.sets:
                raise ConfigError("--with-prompts publishes the file of eval.prompts; leave it out with eval.sets")
            path = BUILTIN if self.recipe.eval.prompts == "builtin" else Path(self.recipe.eval.prompts)
            write_text(folder / PROMPTS, path.read_text(encoding="utf-8"))
        positions = layout.flat(config).get("max_position_embeddings", 0)
        facts = CardFacts(self.options.repo, self.licence, self.terms, self.data, notices(self.terms, self.data),
                          self.format, shown, files["SERVE.md"], recipe, self.start,
                          self.recipe.generation.answers == "keep", positions)
        write_text(folder / CARD, model_card(facts, report))


def main(recipe: Recipe, switches: set[str], options: Options) -> None:
    token = get_token()
    publication = Publication(recipe, options, switches, token)
    publication.check()
    folder = publication.stage()
    for path in sorted(folder.iterdir()):
        print(f"{path} ({path.stat().st_size:,} bytes)")
    if "dry-run" in switches:
        print("dry run: nothing was uploaded")
        return
    if not token:
        raise ConfigError("no Hub token: set HF_TOKEN or run `hf auth login`")
    content = sha256_json(digests(folder))
    uploader = Uploader(options.repo, token, options.endpoint, options.transfer == "lfs")
    public = "public" in switches
    address, private = uploader.upload(folder, not public, f"Publish {recipe.name} ({content[:12]})", OWNED)
    print(f"published{' (private)' if private else ''}: {address}")
    if public and private:
        print("the repository was private before and stays so; make it public in its settings there")


ABOUT = "Uploads a checked export with its model card; private unless told otherwise."
COMMAND = Command("make publish", ABOUT, main, {
    "dry-run": "write runs/<name>/publish/ and upload nothing", "public": "a public repository",
    "with-prompts": "upload the texts of the evaluation prompts and of prompts.sources[].starts too",
    "despite-verdict": "publish although the evaluation says: do not deploy", "terms-read": "you have read a target "
    "licence that this project does not know, and it allows this"}, Options)

if __name__ == "__main__":
    process(COMMAND)
