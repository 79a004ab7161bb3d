"""Chat templates in the style of known model families, short, and a character tokenizer with their special tokens."""

from tokenizers import Tokenizer, decoders, models
from transformers import AddedToken, PreTrainedTokenizerFast

CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
CHATML_DEFAULT = ("{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
                  + CHATML)
LLAMA3 = ("{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' "
          "+ m.content | trim + '<|eot_id|>' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")
GEMMA = ("{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
         "{% set loop_messages = messages[1:] %}{% else %}{% set first = '' %}{% set loop_messages = messages %}"
         "{% endif %}{% for m in loop_messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
         "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
         "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' "
         "+ (first if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}")
# As Mistral-7B-Instruct-v0.3: the system text stands before the last message, and only if that is the user's.
MISTRAL = ("{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
           "{% else %}{% set rest = messages %}{% endif %}{{ bos_token }}{% for m in rest %}{% if m.role == 'user' %}"
           "{% if loop.last and system is defined %}{{ '[INST] ' + system + '\n\n' + m.content + '[/INST]' }}"
           "{% else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}"
           "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}")
# As Qwen3: reasoning is shown behind the last user query only, tool calls and results in the hermes format.
QWEN3 = r"""{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}
{%- for t in tools %}{{- t | tojson + '\n' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(query=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
  {%- set content = m.content %}{%- set thought = '' %}
  {%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}
  {%- elif '</think>' in content %}
    {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\n') %}
  {%- endif %}
  {{- '<|im_start|>assistant\n' }}
  {%- if loop.index0 > ns.query and (loop.last or thought) %}
    {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
  {%- else %}{{- content }}{%- endif %}
  {%- for call in m.tool_calls or [] %}
    {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
    {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
    {{- '}\n</tool_call>' }}
  {%- endfor %}
  {{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
  {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
  {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
  {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"""
# The same, served with thinking switched off: the prompt supplies the empty block.
QWEN3_OFF = "{%- set enable_thinking = false %}" + QWEN3
# As DeepSeek-R1: the prompt opens the thinking, history never shows any.
DEEPSEEK = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
            "{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% else %}{% set content = m.content %}"
            "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
            "{{ '<｜Assistant｜>' + content + eos_token }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}")
BOS, EOS = "<s>", "</s>"
ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", EOS)
SPECIAL = [BOS, EOS, "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
           "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<｜User｜>", "<｜Assistant｜>"]
PLAIN_ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
CHARACTERS = [*map(chr, range(32, 127)), "\n", "é", "｜"]
MERGES = [("\n", "\n"), ("i", "n"), ("in", "g"), (" ", "a")]  # so that where text is cut matters


def family_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Characters with a few merges; control tokens of all families; think and tool markers added, not special."""
    pieces = ["<unk>", *CHARACTERS, *("".join(m) for m in MERGES)]
    core = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, MERGES, unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token=BOS, eos_token=EOS)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL], special_tokens=True)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN_ADDED])
    tokenizer.chat_template = template
    return tokenizer


def end_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return tokenizer.convert_tokens_to_ids(list(ENDS))
