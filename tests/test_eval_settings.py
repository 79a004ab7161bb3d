"""eval.sampling and eval.stop: what a recipe may say, what the loop is told, and what is measured at them."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from fakes import RuleDrafter, RuleTarget, follows
from test_decode import PROMPTS
from test_rejections import output, row
from test_tree_decode import STATIC, eagle3
from tiny import LAYERS, V, load_target, plain_model, write_recipe, write_target

from data.chat import reply_message
from data.sampling import Sampling, penalised, probabilities, row_names
from drafters.registry import entry, options_of
from drafters.tree import DynamicTree, StaticTree, chain
from eval import adapt, lossless, timing
from eval.choice import Curve
from eval.decode import Decoder, Output
from eval.earlier import key_of
from eval.lossless import compare_greedy, sampling_report, top2_gap
from eval.rejections import entropies, seen_before
from eval.rows import reply_to
from eval.settings import AT, beyond_greedy, exact_of, greedy_of, how_of, measured_at, read, sampling_of, written
from eval.verify import Typical
from recipes.errors import ConfigError
from recipes.files import sha256_json
from recipes.loader import load_recipe
from recipes.schema import Eval
from recipes.schema import Sampling as Section

LIMIT = 15
WARM = Sampling(1.3, 6, 0.95, 0.05, 1.4)  # every processor acts


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = write_target(tmp_path_factory.mktemp("target"))
    return load_target(folder, "float64", LAYERS), plain_model(folder)


def processed(model, ids: list[int], sampling: Sampling) -> torch.Tensor:
    """[V] the next token's distribution by transformers' own logits processors."""
    row = torch.tensor([ids])
    with torch.no_grad():
        logits = model(row).logits[:, -1]
    config = model._prepare_generation_config(
        None, do_sample=True, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
        min_p=sampling.min_p or None, repetition_penalty=sampling.repetition_penalty)[0]
    return model._get_logits_processor(config, input_ids_seq_length=len(ids))(row, logits)[0].softmax(-1)


def section(**values) -> Eval:
    return Eval(sampling=Section(**values))


def test_defaults_are_plain_greedy_decoding():
    """The recipe's section and the loop's settings have the same names and defaults."""
    assert asdict(Section()) == asdict(Sampling()) and [*AT] == [*asdict(Sampling()), "stop"]
    assert sampling_of(Eval()) == Sampling() and how_of(Eval()) == greedy_of(Eval()) == exact_of(Eval())
    assert beyond_greedy(written(Sampling(), [])) == "" and read({}) == AT


@pytest.mark.parametrize("name, value, message", [
    ("sampling.temperature", "-0.1", "greater than or equal to 0"), ("sampling.temperature", "0.001", "at least 0.01"),
    ("sampling.temperature", "101", "less than or equal to 100"), ("sampling.temperature", ".nan", "to 100"),
    ("sampling.top_k", "-1", "greater than or equal to 0"), ("sampling.top_k", "true", "not true or false"),
    ("sampling.top_p", "0", "greater than 0"), ("sampling.top_p", "1.01", "less than or equal to 1"),
    ("sampling.min_p", "1.5", "less than or equal to 1"), ("sampling.repetition_penalty", "0", "to 0.1"),
    ("stop", "['']", "at least 1 character"), ("stop", "x", "valid list")])
def test_what_no_distribution_has_is_refused(tmp_path, name, value, message):
    """One line that names field and value; the trace's own sampling has the same bounds."""
    recipe = write_recipe(tmp_path / "r.yaml", tmp_path / "model")
    with pytest.raises(ConfigError) as error:
        load_recipe(recipe, {f"eval.{name}": value})
    assert message in str(error.value) and f"eval.{name}" in str(error.value)
    shared = name.removeprefix("sampling.")
    if shared in ("temperature", "top_p"):
        for flags in ({f"generation.{shared}": value}, {"prompts.sources": f"[{{{shared}: {value}}}]"}):
            with pytest.raises(ConfigError) as error:
                load_recipe(recipe, flags)
            assert message in str(error.value) and shared in str(error.value)


def test_words_by_hand():
    """What acts is named, what is off or has no say in greedy text is not."""
    assert {measured_at(one) for one in ({}, {"temperature": 0.0, "top_p": 0.9})} == {"temperature 0 (greedy)"}
    full = written(Sampling(0.7, 20, 0.9, 0.05, 1.1), ["a", "b"])
    assert measured_at(full) == ("temperature 0.7, top-k 20, top-p 0.9, min-p 0.05, repetition penalty 1.1, 2 stop "
                                 "strings")
    assert beyond_greedy({"temperature": 0.0, "stop": ["x"]}) == "temperature 0 (greedy), 1 stop string"
    assert beyond_greedy({"temperature": 0.0, "repetition_penalty": 1.1}).endswith("repetition penalty 1.1")
    assert beyond_greedy({"temperature": 0.0, "top_k": 5}) == ""


def test_the_proof_on_greedy_text_keeps_penalty_and_stop_strings():
    """Both act on greedy text; typical acceptance has a temperature of its own and is never part of a proof."""
    one = replace(section(temperature=0.8, top_p=0.9, repetition_penalty=1.2), stop=["###"], seed=5)
    assert how_of(one) == exact_of(one) == {"seed": 5, "sampling": Sampling(0.8, 0, 0.9, 0.0, 1.2), "stop": ("###",)}
    assert greedy_of(one) == {"seed": 5, "sampling": Sampling(0.0, 0, 0.9, 0.0, 1.2), "stop": ("###",)}
    assert how_of(section(top_p=0.5)) == greedy_of(section(top_p=0.5))  # nothing is sampled: one run serves both
    lossy = Eval(acceptance="typical", stop=["x"])
    assert how_of(lossy) == {"seed": 0, "sampling": Sampling(0.7), "stop": ("x",), "typical": Typical(0.09, 0.3)}
    assert exact_of(lossy) == greedy_of(lossy) == {"seed": 0, "sampling": Sampling(), "stop": ("x",)}
    with pytest.raises(ConfigError, match="leave eval.sampling at its defaults"):
        how_of(replace(section(top_k=3), acceptance="typical"))


def test_earlier_evaluations_keep_their_key():
    """A report of before there was a choice is of its default: the same evaluation is found finished."""
    old = {k: v for k, v in asdict(Eval()).items() if k not in ("tracker", "server", "sampling", "stop")}
    assert key_of("d", Eval(), [], {}) == sha256_json(["d", old, sha256_json({}), {}])
    assert len({key_of("d", one, [], {}) for one in (Eval(), Eval(stop=["x"]), section(temperature=1.0),
                                                     section(temperature=1.0, top_p=0.9))}) == 4


PLANS = {"stops early": chain(4, 0.03), "static": STATIC, "dynamic": DynamicTree(3, 3, 8)}
ENDS = [*range(30, 45)]


def answers(target, drafter, plan, prompts: list[list[int]], names: list[str], **more) -> dict[str, tuple]:
    """Text and drafts of each row by its name."""
    decoder = Decoder(target, 10, replace(WARM, top_k=0), end_ids=ENDS, seed=3, **more)
    out = decoder.speculative(prompts, drafter, plan, names=names) if drafter else decoder.plain(prompts, names)
    return {name: (o.tokens, o.drafts, o.refused) for name, o in zip(names, out)}


@pytest.mark.parametrize("plan", [*PLANS, "lookup", "plain"])
def test_a_rows_random_numbers_are_its_own(world, plan):
    """A sampled row has the same text and drafts alone, in any order and batch, and where finished rows are replaced,
    also where drafts are shorter than a neighbour's or no neighbour drafts at all. Another seed gives another text."""
    target, _ = world
    prompts = [*PROMPTS, [5, 6, 5, 6, 5, 6, 5]]
    names = [f"row {i}" for i in range(len(prompts))]
    drafter = {"lookup": entry("lookup").code.build(options_of("lookup", {}), target, {}, 0),
               "plain": None}.get(plan, eagle3(target))
    chosen = PLANS.get(plan, chain(3))
    whole = answers(target, drafter, chosen, prompts, names)
    assert answers(target, drafter, chosen, prompts[::-1], names[::-1], slots=2) == whole
    for prompt, name in zip(prompts, names):
        assert answers(target, drafter, chosen, [prompt], [name]) == {name: whole[name]}
    others = answers(target, drafter, chosen, prompts, [name + "'" for name in names])
    assert [*others.values()] != [*whole.values()]
    assert len({len(tokens) for tokens, _, _ in whole.values()}) > 1  # rows left at different times


class Letters:
    """Token ids 0 to 3 as letters."""

    def decode(self, ids: list[int], **how) -> str:
        return "".join("abcd"[i] for i in ids)


@pytest.mark.parametrize("plan", [chain(2), StaticTree(((0,), (1,), (0, 0), (1, 0))), None])
def test_sampled_and_stopped_answers_follow_the_exact_distribution(plan):
    """Whole answers of 1500 rows, up to five tokens: temperature, top-p and a repetition penalty of each path,
    ended by the stop strings "ab" and "cc"; every answer with its exact probability, by enumeration. None: plain."""
    table = torch.tensor([[0.1, 0.5, 0.3, 0.1], [0.55, 0.25, 0.1, 0.1], [0.05, 0.45, 0.4, 0.1], [0.25, 0.25, 0.4, 0.1]],
                         dtype=torch.float64)
    target = RuleTarget(lambda seen, positions: table.log()[seen.gather(1, positions)])
    target.tokenizer = Letters()
    sampling = Sampling(0.8, 0, 0.95, 0.0, 1.3)
    exact: dict[tuple[int, ...], float] = {}

    def spell(answer: tuple[int, ...], mass: float) -> None:
        if len(answer) == 5 or Letters().decode(answer).endswith(("ab", "cc")):
            exact[answer] = mass
            return
        seen = torch.zeros(4, dtype=torch.bool)
        seen[[3, *answer]] = True
        p = probabilities(penalised(table[(3, *answer)[-1]].log(), 1.3, seen), sampling)
        for token in p.nonzero()[:, 0].tolist():
            spell((*answer, token), mass * float(p[token]))

    spell((), 1.0)
    assert sum(exact.values()) == pytest.approx(1) and len({len(answer) for answer in exact}) == 4
    decoder = Decoder(target, 5, sampling, seed=11, stop=["ab", "cc"])
    drafter = RuleDrafter(lambda row, last, step: torch.tensor([0.3, 0.4, 0.2, 0.1]))
    prompts = [[3]] * 1500
    out = decoder.speculative(prompts, drafter, plan) if plan else decoder.plain(prompts)
    assert follows([tuple(o.tokens) for o in out], exact) > 1e-4
    assert sum(bool(o.stopped_by) for o in out) > 250


def test_rows_without_names_are_told_apart():
    """By prompt, and like prompts by their order, so that repeated prompts are independent draws."""
    assert row_names([[1, 2], [3], [1, 2]]) == ["0:1 2", "0:3", "1:1 2"]
    assert row_names([[12]]) != row_names([[1, 2]])


@pytest.mark.parametrize("sampling, stop", [(Sampling(repetition_penalty=1.5), []), (Sampling(), ["ab", "e"]),
                                            (Sampling(0.8, top_k=1, repetition_penalty=1.3), ["q", "7"])])
def test_the_other_baseline_decodes_at_the_same_settings(world, sampling, stop):
    """Case 23: transformers' generate is penalised and stopped as the loop, end tokens too; with top-k 1 sampled text
    is greedy text."""
    target, _ = world
    stopped = 0
    for prompt in PROMPTS:
        decoder = Decoder(target, LIMIT, sampling, stop=stop)
        with timing.as_loaded(decoder, prompt):
            theirs = timing.generate(decoder, prompt)
        ours = decoder.plain([prompt])[0]
        assert theirs.tokens == ours.tokens
        stopped += bool(ours.stopped_by)
    assert bool(stopped) == bool(stop)


def test_stop_strings_are_looked_for_in_the_answer_alone(world):
    """A stop string that begins in the prompt ends nothing, in the loop and in transformers' generate."""
    tokenizer = world[0].tokenizer
    ids = tokenizer("ba ab", add_special_tokens=False, return_tensors="pt").input_ids
    stops = Decoder(world[0], 1, stop=["ab"]).stops
    assert [bool(timing.Stopping(stops, begin)(ids, None)[0]) for begin in (2, 3, 4)] == [True, True, False]


@pytest.mark.slow
def test_the_other_baseline_samples_the_same_distribution(world):
    """Case 23: the first token of 250 answers of transformers' generate follows the exact distribution of the settings;
    the same seed gives the same answer, and torch's own numbers go on as before."""
    target, model = world
    prompt = PROMPTS[0]

    def drawn(seed: int, tokens: int = 12, count: int = 1) -> list[tuple[int, ...]]:
        decoder = Decoder(target, tokens, WARM, end_ids=[], seed=seed)
        with timing.as_loaded(decoder, prompt):
            return [tuple(timing.generate(decoder, prompt).tokens) for _ in range(count)]

    exact = {(token,): p for token, p in enumerate(processed(model, prompt, WARM).tolist()) if p > 0}
    assert 2 < len(exact) <= 6
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    assert follows(drawn(0, 1, 250), exact) > 1e-4
    assert torch.equal(torch.rand(3), expected)
    assert drawn(7) == drawn(7) != drawn(8)


class Line:
    """A target that gives fixed logits, whatever it is asked."""

    device = torch.device("cpu")

    def forward(self, ids, positions):
        return type("States", (), {"logits": torch.tensor([[[6.0, 4.0, -1.0, 0.0]]]).expand(1, ids.shape[1], 4)})


def test_near_ties_are_judged_behind_the_penalty():
    """Case 59: 6 / 1.5 is 4: a tie behind a penalty for token 0, which the prompt holds; without one it is none."""
    spec, plain = [Output([1])], [Output([0])]
    assert top2_gap(Line(), [0, 3]) == 2.0
    assert top2_gap(Line(), [0, 3], Sampling(repetition_penalty=1.5)) == 0.0
    assert top2_gap(Line(), [2, 3], Sampling(repetition_penalty=1.5)) == 2.0  # other tokens were seen
    for sampling, mismatches in ((Sampling(), 1), (Sampling(repetition_penalty=1.5), 0)):
        found = compare_greedy(Line(), [[0, 3]], plain, spec, 1e-4, sampling)
        assert (found["mismatches"], found["near_ties"]) == (mismatches, 1 - mismatches)


def test_the_sampling_test_is_made_at_the_settings(world, monkeypatch):
    """The distribution that verified tokens are judged by is transformers' own at these settings, the penalty of prompt
    and first token included; the right verification passes, and one at another temperature does not."""
    target, model = world
    drafter, seen = eagle3(target), []
    judge = lossless.judge_context
    monkeypatch.setattr(lossless, "judge_context", lambda p, *rest: seen.append(p) or judge(p, *rest))
    found = sampling_report(target, drafter, PROMPTS, 3000, 0, tree=True, sampling=WARM)
    assert found["tests"] == 4 and found["p_value"] > 1e-3 and found["max_tv"] < 0.05
    greedy = Decoder(target, 1, replace(WARM, temperature=0.0), end_ids=[])
    for prompt, p in zip(PROMPTS, seen):
        first = greedy.plain([prompt])[0].tokens
        torch.testing.assert_close(p.double(), processed(model, prompt + first, WARM), atol=1e-6, rtol=0)
    verify = lossless.verify_sampled
    monkeypatch.setattr(lossless, "verify_sampled", lambda p, *rest: verify((p**1.3) / (p**1.3).sum(-1, keepdim=True),
                                                                            *rest))
    assert sampling_report(target, drafter, PROMPTS, 3000, 0, sampling=WARM)["p_value"] < 1e-6


def test_entropies_are_of_what_is_sampled_from(world):
    """At each answer token: transformers' processed distribution, every earlier token of the answer penalised."""
    target, model = world
    rows = [row([5, 6, 7]), row([9] * 4)]
    outputs = [output(tokens, []) for tokens in ([11, 12, 11, 14], [20, 9])]
    for sampling in (WARM, Sampling(0.7, top_p=0.9), Sampling(repetition_penalty=1.6)):
        shown = replace(sampling, temperature=1.0) if sampling.greedy else sampling
        for one, answer, nats in zip(rows, outputs, entropies(target, rows, outputs, sampling)):
            for i, value in enumerate(nats):
                p = processed(model, one.ids + answer.tokens[:i], shown)
                assert value == pytest.approx(float(torch.special.entr(p).sum()), abs=1e-5)


def test_what_was_seen_before_by_hand():
    seen = seen_before([1, 3], [3, 0, 2], 4)
    assert seen.tolist() == [[False, True, False, True], [False, True, False, True], [True, True, False, True]]


def test_a_later_turn_holds_the_text_without_its_stop_string(world):
    """As a client sends it back: neither the stop string nor what stands behind it in its last token."""
    tokenizer = world[0].tokenizer
    tokens = tokenizer("one two", add_special_tokens=False).input_ids
    assert reply_to(tokenizer, Output(tokens, "stop", stopped_by=" tw"))["content"] == "one"
    assert reply_to(tokenizer, Output([*tokens, 2], "stop")) == reply_message(tokenizer, tokens)
    assert reply_to(tokenizer, Output(tokens, "length"))["content"] == "one two"


@pytest.mark.slow
def test_the_choice_of_a_plan_follows_sampled_answers(world, monkeypatch):
    """Ranks along sampled answers are the probabilities that guesses are accepted: the share of the first guess agrees
    with what the loop then accepts with drafts of one token, and the greedy answers' does not."""
    target, _ = world
    drafter, asked = entry("layer_cut").code.build(options_of("layer_cut", {"layers": 5}), target, {}, 0), []
    monkeypatch.setattr(adapt, "measure_curve", lambda *args: Curve(1.0, {2: 1.1}, {1: 0.1}))
    monkeypatch.setattr(adapt, "choose", lambda accuracies, *rest: asked.append(accuracies))
    one = replace(section(temperature=2.0), draft_length=1, speed_tokens=24, tree=replace(Eval().tree, top_k=V))
    prompts = [[3 + i, 9, 14] for i in range(10)]
    adapt.measured_choice(target, drafter, prompts, one)
    adapt.measured_choice(target, drafter, prompts, replace(one, sampling=Section()))
    outputs = Decoder(target, 24, seed=9, sampling=Sampling(2.0)).speculative(prompts, drafter, 1)
    drafts = sum(o.acceptance.drafts for o in outputs)
    first = sum(sum(o.acceptance.accepted) for o in outputs) / drafts
    spread = 4 * math.sqrt(2 * first * (1 - first) / drafts)
    assert asked[0][0][0] == pytest.approx(first, abs=spread) and sum(asked[0][0]) == pytest.approx(1.0)
    assert abs(asked[1][0][0] - first) > spread


def test_probabilities_sum_to_one_at_the_bounds():
    """The coldest temperature and the smallest nucleus that a recipe may say leave a distribution, of extreme logits
    too."""
    logits = torch.tensor([[300.0, 299.0, -300.0, 0.0]])
    for sampling in (Sampling(0.01), Sampling(100.0), Sampling(1.0, top_p=1e-6), Sampling(1.0, min_p=1.0)):
        p = probabilities(logits, sampling)
        assert bool(p.isfinite().all()) and float(p.sum()) == pytest.approx(1.0)
