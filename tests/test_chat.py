"""Chat rendering: which tokens are supervised, and from which positions a draft is trained."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from torch import tensor

from data.chat import loss_positions, prompt_ids, render, user_header_ids
from data.literal import Unrenderable
from drafters.base import loss_mask
from recipes.errors import ConfigError
from tests.tiny import CHATML, chat_tokenizer

END = 2
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = [
    {"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and now?"},
    {"role": "assistant", "content": "no."},
]
PARTS = [  # the conversation above, cut by hand where supervision begins and ends
    ("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", 0),
    ("yes<|im_end|>", 1), ("\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n", 0),
    ("no.<|im_end|>", 2),
]


def by_hand(tokenizer, parts: list[tuple[str, int]]) -> tuple[list[int], list[int]]:
    ids, turns = [], []
    for text, turn in parts:
        piece = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += piece
        turns += [turn] * len(piece)
    return ids, turns


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["stock", "with generation markers"])
def test_mask_covers_answers_and_their_end_tokens_only(template):
    """Exactly the assistant text and its end token are supervised, markers or not (case 06)."""
    tokenizer = chat_tokenizer(template)
    [rendered] = render(tokenizer, TALK, [END])
    assert (rendered.ids, rendered.turns) == by_hand(tokenizer, PARTS)
    assert rendered.turns.count(1) == len("yes") + 1 and rendered.turns.count(2) == len("no.") + 1


def test_mask_equals_transformers_mask_where_markers_exist():
    """With generation markers our mask is transformers' own assistant mask (case 06)."""
    tokenizer = chat_tokenizer(MARKED)
    theirs = tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    [rendered] = render(tokenizer, TALK, [END])
    assert rendered.ids == theirs["input_ids"][:-1]  # theirs goes on with the newline behind the last end token
    assert [int(t > 0) for t in rendered.turns] == theirs["assistant_masks"][:-1]


def test_answer_that_ends_in_spaces_stops_at_its_end_token():
    """Trailing spaces do not let the mask run into the next user turn, which nobody answered (case 68)."""
    tokenizer = chat_tokenizer()
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b  "}, {"role": "user", "content": "c"}]
    parts = [("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", 0), ("b  <|im_end|>", 1)]
    [rendered] = render(tokenizer, talk, [END])
    assert (rendered.ids, rendered.turns) == by_hand(tokenizer, parts)


def test_conversation_that_begins_with_the_assistant():
    """A greeting before the first user turn is context: nobody asked for it; alone it is no row (cases 64, 68)."""
    tokenizer = chat_tokenizer()
    talk = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "ok"}]
    parts = [("<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", 0),
             ("ok<|im_end|>", 1)]
    [rendered] = render(tokenizer, talk, [END])
    assert (rendered.ids, rendered.turns) == by_hand(tokenizer, parts)
    with pytest.raises(Unrenderable, match="no assistant turn follows a user turn"):
        render(tokenizer, talk[:2], [END])


def test_template_without_an_end_token_is_an_error():
    """An assistant turn that the template never closes with an end token is refused (case 06)."""
    with pytest.raises(ConfigError, match=r"without an end token of the target; end ids \[2\]"):
        render(chat_tokenizer(CHATML.replace("<|im_end|>", "")), TALK, [END])


def test_user_header_is_what_precedes_the_first_user_text():
    """Prompt synthesis starts from the literal user header; altered user text is an error (case 29)."""
    tokenizer = chat_tokenizer()
    assert user_header_ids(tokenizer) == tokenizer("<|im_start|>user\n", add_special_tokens=False)["input_ids"]
    with pytest.raises(ConfigError, match="verbatim"):
        user_header_ids(chat_tokenizer(CHATML.replace("m['content']", "m['content']|upper")))


def test_prompt_holds_one_beginning_token_and_equals_the_serving_ids():
    """A template that renders BOS, with a tokenizer that adds one too, yields exactly one (case 45)."""
    tokenizer = chat_tokenizer("{{ '<unk>' }}" + CHATML)  # <unk> plays BOS
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 0)])
    assert tokenizer("a")["input_ids"][0] == 0, "the tokenizer must add BOS on its own for this test to mean anything"
    ids = prompt_ids(tokenizer, TALK[:2])
    assert ids.count(0) == 1 and ids[0] == 0
    assert ids == tokenizer.apply_chat_template(TALK[:2], add_generation_prompt=True, return_dict=False)


def test_prompt_renders_the_tools_of_its_row():
    """Tool definitions reach the template, as a server hands them over (case 27)."""
    tokenizer = chat_tokenizer("{% if tools %}{{ tools[0]['function']['name'] }} {% endif %}" + CHATML)
    ids = prompt_ids(tokenizer, TALK[:2], [{"type": "function", "function": {"name": "weather"}}])
    assert tokenizer.decode(ids).startswith("weather <|im_start|>") and "weather" not in tokenizer.decode(
        prompt_ids(tokenizer, TALK[:2]))


@pytest.mark.parametrize("depth, expected", [(0, [2, 3, 4, 8]), (1, [2, 3]), (2, [2]), (3, [])])
def test_loss_positions_of_a_hand_written_sample(depth, expected):
    """Twelve tokens, two turns: the last prompt positions (2, 8) carry loss, no turn's end is crossed (case 31)."""
    turns = [0, 0, 0, 1, 1, 1, 1, 0, 0, 2, 2, 0]
    assert loss_positions(turns, depth) == expected


def test_loss_positions_at_the_right_edge():
    """An answer cut at the row's end loses what would be predicted beyond it, and nothing else (case 31)."""
    assert loss_positions([0] * 8 + [1] * 4, 0) == [7, 8, 9]
    assert loss_positions([0] * 8 + [1] * 4, 2) == [7]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0, 0, 1, 1, 1, 2]), min_size=1, max_size=14), st.integers(0, 5))
def test_loss_mask_of_the_drafters_marks_the_same_positions(turns, depth):
    """The batched mask that training uses equals the written definition for any turns (cases 31, 09)."""
    assert loss_mask(tensor([turns]), depth)[0].nonzero()[:, 0].tolist() == loss_positions(turns, depth)
