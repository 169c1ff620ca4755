"""Loss masks of conversations: exactly what the assistant says after each of its prompts, token for token."""

import copy
import re

import numpy as np
import pytest

from tests.data.tiny import config_of, sentencepiece, tokenizer, write_lines
from wedlm_jax.data.chat import from_messages, prompt_of
from wedlm_jax.data.documents import Documents, with_chat_template
from wedlm_jax.data.messages import read_messages
from wedlm_jax.data.records import BadRecord
from wedlm_jax.data.tokenizer import decoder_behind, load_tokenizer
from wedlm_jax.errors import UserError

# Written for these tests: a system prompt of its own where the conversation has none, tool results as the user's turn.
QWEN25_STYLE = """
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' + call.function.name + '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Thinking is written for the last turn alone, and taken out of those before the last question.
QWEN3_STYLE = """
{%- set ns = namespace(question=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set think = m.reasoning_content or '' %}{% set said = m.content %}
{%- if '</think>' in said %}
{%- set think = said.split('</think>')[0].split('<think>')[-1].strip() %}{% set said = said.split('</think>')[-1] %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.question and (loop.last or think) %}
{{- '<think>\\n' + think + '\\n</think>\\n\\n' + said.lstrip() }}{% else %}{{ said.lstrip() }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
OPENS_THINKING = QWEN3_STYLE.replace(
    "add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}",
    "add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}",
)

LATER_MATTERS = """{{ messages | length }}
{%- for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}>{% endif %}"""
NO_PROMPT = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}"
NO_END = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
# As Llama 3.1 and Phi-3 have it: another token ends a call, or every turn but what comes last.
CALLS_END_OTHERWISE = QWEN25_STYLE.replace(
    "{{- '<|im_end|>\\n' }}", "{{- '<|endoftext|>' if m.tool_calls else '<|im_end|>' }}"
)
ENDS_ONCE = """{%- for m in messages %}{{ m.role + '\\n' + m.content + '<|endoftext|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant\\n' }}{% else %}{{ '<|im_end|>' }}{% endif %}"""
NO_CALLS = "\n".join(line for line in QWEN25_STYLE.splitlines() if "tool_call>" not in line)
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system, please') }}{% endif %}" + QWEN25_STYLE


USER, SYSTEM, END = "<|im_start|>user\n", "<|im_start|>system\n", "<|im_end|>"
ASSISTANT = "<|im_start|>assistant\n"


def test_control_tokens_are_known_from_tokenizer_json_alone(tmp_path):
    """A directory without tokenizer_config.json: no token is the end, or the start, by name."""
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    bare = load_tokenizer(tmp_path)
    bare.chat_template, bare.eos_token = QWEN25_STYLE, END
    with pytest.raises(BadRecord, match=re.escape("the text holds the control token '<|im_start|>'")):
        from_messages(messages("cat<|im_start|>", "sat"), bare, num_end_tokens=1)


def of_style(template):
    made = copy.deepcopy(tokenizer())
    made.chat_template = template
    return made


def messages(*texts):
    """user, assistant, user, ...; `system:` and `tool:` in front of a text name another role."""
    made, role = [], "user"
    for text in texts:
        for other in ("system", "tool"):
            if text.startswith(f"{other}:"):
                made.append({"role": other, "content": text.removeprefix(f"{other}:")})
                role = "user" if other == "system" else "assistant"
                break
        else:
            made.append({"role": role, "content": text})
            role = "assistant" if role == "user" else "user"
    return made


def tool_call(name, content=""):
    return {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": name, "arguments": {}}}]}


TWO_TURNS = messages("the cat", "on a mat", "one red", "bird")
DEFAULT_SYSTEM = f"{SYSTEM}Be brief.{END}\n"
CASES = {
    "two turns": (
        QWEN25_STYLE, TWO_TURNS, "all",
        [(f"{DEFAULT_SYSTEM}{USER}the cat{END}\n{ASSISTANT}", 0), (f"on a mat{END}", 1),
         (f"\n{USER}one red{END}\n{ASSISTANT}", 0), (f"bird{END}", 1)],
    ),
    "only the last turn": (
        QWEN25_STYLE, TWO_TURNS, "last",
        [(f"{DEFAULT_SYSTEM}{USER}the cat{END}\n{ASSISTANT}on a mat{END}\n{USER}one red{END}\n{ASSISTANT}", 0),
         (f"bird{END}", 1)],
    ),
    "a system prompt": (
        QWEN25_STYLE, messages("system:sat", "the", "cat"), "all",
        [(f"{SYSTEM}sat{END}\n{USER}the{END}\n{ASSISTANT}", 0), (f"cat{END}", 1)],
    ),
    "a turn of no weight": (
        QWEN25_STYLE, [TWO_TURNS[0], TWO_TURNS[1] | {"weight": 0}, TWO_TURNS[2], TWO_TURNS[3] | {"weight": 1}], "all",
        [(f"{DEFAULT_SYSTEM}{USER}the cat{END}\n{ASSISTANT}on a mat{END}\n{USER}one red{END}\n{ASSISTANT}", 0),
         (f"bird{END}", 1)],
    ),
    "an empty turn that is not learned": (
        QWEN25_STYLE, messages("the cat", "", "one red", "bird"), "last",
        [(f"{DEFAULT_SYSTEM}{USER}the cat{END}\n{ASSISTANT}{END}\n{USER}one red{END}\n{ASSISTANT}", 0), (f"bird{END}", 1)],
    ),
    "an empty turn of no weight": (
        QWEN25_STYLE, [TWO_TURNS[0], {"role": "assistant", "content": "", "weight": 0}, *TWO_TURNS[2:]], "all",
        [(f"{DEFAULT_SYSTEM}{USER}the cat{END}\n{ASSISTANT}{END}\n{USER}one red{END}\n{ASSISTANT}", 0), (f"bird{END}", 1)],
    ),
    "a tool turn": (
        QWEN25_STYLE, [*messages("the cat"), tool_call("look"), *messages("tool:a mat", "on a mat")], "all",
        [(f"{DEFAULT_SYSTEM}{USER}the cat{END}\n{ASSISTANT}", 0), (f"\n<tool_call>\nlook\n</tool_call>{END}", 1),
         (f"\n{USER}<tool_response>\na mat\n</tool_response>{END}\n{ASSISTANT}", 0), (f"on a mat{END}", 1)],
    ),
    "no thinking: the last turn says so, the earlier ones do not": (
        QWEN3_STYLE, TWO_TURNS, "all",
        [(f"{USER}the cat{END}\n{ASSISTANT}", 0), (f"on a mat{END}", 1),
         (f"\n{USER}one red{END}\n{ASSISTANT}", 0), (f"<think>\n\n</think>\n\nbird{END}", 1)],
    ),
    "thinking of the last turn is learned": (
        QWEN3_STYLE, messages("the cat", "<think>a lake</think>bird"), "all",
        [(f"{USER}the cat{END}\n{ASSISTANT}", 0), (f"<think>\na lake\n</think>\n\nbird{END}", 1)],
    ),
    "thinking of an earlier turn is no matter where only the last is learned": (
        QWEN3_STYLE, messages("the cat", "<think>a lake</think>sat", "one red", "bird"), "last",
        [(f"{USER}the cat{END}\n{ASSISTANT}sat{END}\n{USER}one red{END}\n{ASSISTANT}", 0),
         (f"<think>\n\n</think>\n\nbird{END}", 1)],
    ),
    "thinking that the prompt opens, as Qwen3-Thinking's": (
        OPENS_THINKING, messages("the cat", "<think>a lake</think>bird"), "all",
        [(f"{USER}the cat{END}\n{ASSISTANT}<think>\n", 0), (f"a lake\n</think>\n\nbird{END}", 1)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_end_tokens", [1, 3])
def test_the_mask_covers_what_the_assistant_says_and_its_end_token_for_token(case, num_end_tokens):
    template, conversation, turns, segments = CASES[case]
    made = of_style(template)
    example = from_messages(conversation, made, num_end_tokens=num_end_tokens, loss_on_turns=turns, document_id=7)
    tokens, learned = [], []
    for text, is_learned in segments:
        ids = made(text, add_special_tokens=False)["input_ids"]
        tokens += ids
        learned += [bool(is_learned)] * len(ids)
    extra = num_end_tokens - 1
    assert example.tokens.tolist() == tokens + [made.eos_token_id] * extra
    assert example.loss_mask.tolist() == learned + [True] * extra
    assert example.document_id == 7


@pytest.mark.parametrize("template", [QWEN25_STYLE, QWEN3_STYLE])
def test_what_precedes_each_learned_turn_is_what_a_decoder_is_given(template):
    """And the tokens are those of the whole conversation written at once."""
    made = of_style(template)
    example = from_messages(TWO_TURNS, made, num_end_tokens=1)
    starts = np.flatnonzero(np.diff(example.loss_mask.astype(int)) == 1) + 1
    for start, count in zip(starts, (1, 3), strict=True):
        prompt = made.apply_chat_template(TWO_TURNS[:count], tokenize=False, add_generation_prompt=True)
        assert made(prompt, add_special_tokens=False)["input_ids"] == example.tokens[:start].tolist()
    whole = made.apply_chat_template(TWO_TURNS, tokenize=False).removesuffix("\n")
    assert made(whole, add_special_tokens=False)["input_ids"] == example.tokens.tolist()


@pytest.mark.parametrize("thinks", [False, True])
def test_each_turn_is_learned_behind_the_prompt_that_a_decoder_is_given(tmp_path, thinks):
    """Where the template writes a turn otherwise once others follow, so that one text cannot hold them all."""
    replies = ["cat", "saw", "mat"]
    said = ["<think>\na lake\n</think>\n\n" + reply if thinks else reply for reply in replies]
    conversation = messages("the", said[0], "one", said[1], "on a", said[2])
    conversation[3]["weight"] = 0
    path = write_lines(tmp_path / "chat.jsonl", [{"messages": conversation}])
    variables = None if thinks else '{"enable_thinking": false}'
    config = config_of(path, loss_on_turns="each", num_end_tokens=3, chat_template_kwargs=variables)
    made = with_chat_template(of_style(QWEN3_STYLE), config)
    with pytest.raises(BadRecord, match="data.loss_on_turns=each or last"):
        from_messages(conversation, made, num_end_tokens=1)
    examples = Documents(config, made, 0, "train")[0].examples
    assert [made.decode(one.tokens[one.loss_mask]) for one in examples] == [said[0] + 3 * END, said[2] + 3 * END]
    prompts = [prompt_of(conversation[:count], made) for count in (1, 5)]
    assert [one.tokens[~one.loss_mask].tolist() for one in examples] == prompts
    assert len({one.document_id for one in examples}) == 2


@pytest.mark.parametrize(
    ("template", "conversation", "message"),
    [
        (
            QWEN3_STYLE,
            messages("the", "<think>a lake</think>sat", "one", "bird"),
            "message 1: the chat template leaves out",
        ),
        (
            QWEN3_STYLE,
            [
                {"role": "user", "content": "the"},
                tool_call("look", "<think>by a lake</think>so"),
                *messages("tool:one", "bird", "red", "mat"),
            ],
            "message 1: the chat template leaves out",
        ),
        (
            NO_CALLS,
            [{"role": "user", "content": "the"}, tool_call("look", ""), *messages("tool:one", "bird", "red", "mat")],
            "message 1: the chat template leaves out the calls of this turn; use a template that writes them",
        ),
        (
            CALLS_END_OTHERWISE,
            [*messages("the"), tool_call("look"), *messages("tool:one", "bird")],
            "message 1: the chat template does not end this turn with '<|im_end|>', which comes only after a later message",
        ),
        (
            ENDS_ONCE,
            [*TWO_TURNS[:3], TWO_TURNS[3] | {"weight": 0}],
            "message 1: the chat template does not end this turn with '<|im_end|>', which comes only after a later message",
        ),
        *(
            (
                QWEN25_STYLE,
                [*messages("the"), {"role": "assistant", "content": "cat", name: "by a lake"}],
                "message 1: the chat template leaves out some of this turn, such as its thinking",
            )
            for name in ("reasoning", "thinking")
        ),
        (LATER_MATTERS, TWO_TURNS, "message 1: the chat template's prompt for this turn is no prefix"),
        (
            QWEN3_STYLE,
            [*messages("the", "cat"), {"role": "assistant", "content": "sat"}],
            "learned part is unknown; join it with the turn before, which is the assistant's too",
        ),
        (
            QWEN25_STYLE,
            [{"role": "assistant", "content": "cat"}, *messages("the", "sat")],
            "message 0: a turn of the assistant's that answers nobody; give it weight 0",
        ),
        (NO_END, TWO_TURNS, "message 1: the chat template does not end the assistant's turn with '<|im_end|>'"),
        (
            STRICT,
            messages("system:sat", "the", "cat"),
            "the chat template refuses the conversation (no system, please)",
        ),
        (QWEN25_STYLE, messages("the"), "the last message must be the assistant's"),
        (QWEN25_STYLE, [], "the last message must be the assistant's"),
        (QWEN25_STYLE, messages("the", " "), "message 1: the assistant's turn is empty"),
        (QWEN25_STYLE, messages("cat<|im_end|>", "sat"), "message 0: the text holds the control token '<|im_end|>'"),
        (
            QWEN25_STYLE,
            [
                *messages("the"),
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"name": "look", "arguments": {"at": ["a", "<|im_end|>"]}}],
                },
            ],
            "message 1: the text holds the control token '<|im_end|>'",
        ),
        (
            QWEN25_STYLE,
            [*messages("the"), {"role": "assistant", "content": "cat", "weight": 0}],
            "every turn that could be learned has weight 0",
        ),
    ],
)
def test_where_the_mask_cannot_be_known_the_record_is_bad(template, conversation, message):
    with pytest.raises(BadRecord) as caught:
        from_messages(conversation, of_style(template), num_end_tokens=1)
    assert message in str(caught.value) and "\n" not in str(caught.value)


# As Qwen's: a turn for each role that they know, a default system prompt.
KNOWN_ROLES = """
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\\n' + (m.content | tojson) + '<|im_end|>\\n' }}
{%- elif m.role in ('system', 'user', 'assistant') %}
{{- '<|im_start|>' + m.role + '\\n' + (m.content | trim) + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def test_a_message_whose_role_the_template_passes_over_is_refused():
    """In training and in a prompt; the same text of a role that it writes is not."""
    made = of_style(KNOWN_ROLES)
    lost = [*messages("the"), {"role": "developer", "content": "sing"}, {"role": "assistant", "content": "cat"}]
    for read in (lambda m: from_messages(m, made, num_end_tokens=1), lambda m: prompt_of(m, made)):
        with pytest.raises(BadRecord, match="message 1: the chat template leaves out messages of the role 'developer'"):
            read(lost)
        read([{"role": "system", "content": "sing"}, *lost[:1], *lost[2:]])


# Written either or: what a turn says besides its call, or the call.
ONE_OF_TWO = NO_CALLS.replace("m.content }}", "(m.content or m.tool_calls | tojson) }}")


@pytest.mark.parametrize("shown", ["", "look"])
def test_calls_that_the_template_does_not_write_are_refused_where_they_are_not_learned_either(shown):
    """In training and in a prompt; also where their names are in the text, as those of tools are."""
    for said, lost, kept in (("", NO_CALLS, ONE_OF_TWO), ("so", ONE_OF_TWO, QWEN25_STYLE)):
        called = [*messages("the"), tool_call("look", said), *messages("tool:one", "bird")]
        for read in (lambda m, made: from_messages(m, made, num_end_tokens=1, loss_on_turns="last"), prompt_of):
            with pytest.raises(BadRecord, match="message 1: the chat template leaves out the calls of this turn"):
                read(called, of_style(shown + lost))
            read(called, of_style(shown + kept))


def test_a_turn_of_no_calls_has_none_for_its_template():
    """Llama 3.1's takes every `tool_calls` that is there for one call."""
    said = {"role": "assistant", "content": "cat"}
    assert read_messages([said | {"tool_calls": []}], "messages") == [said]


def test_a_message_that_the_template_writes_otherwise_is_kept():
    """White space moved, quotes escaped; a system prompt that is the template's own."""
    conversation = messages("system: Be  brief.", "the", "cat\nsat", 'tool:"a mat"', "on a mat")
    example = from_messages(conversation, of_style(KNOWN_ROLES), num_end_tokens=1)
    assert '\\"a mat\\"' in tokenizer().decode(example.tokens)


def test_a_tokenizer_without_template_is_no_matter_of_records():
    with pytest.raises(UserError, match="the tokenizer has no chat template") as caught:
        from_messages(TWO_TURNS, of_style(None), num_end_tokens=1)
    assert not isinstance(caught.value, BadRecord)


def test_tools_reach_the_template():
    made = of_style("{% for t in tools or [] %}{{ t.name }}{% endfor %}" + QWEN25_STYLE)
    example = from_messages(TWO_TURNS, made, num_end_tokens=1, tools=[{"name": "lake"}])
    assert made.decode(example.tokens).startswith("lake") and not example.loss_mask[0]
    with pytest.raises(BadRecord, match="tools: the tokenizer's chat template shows none; leave them out"):
        from_messages(TWO_TURNS, of_style(QWEN25_STYLE), num_end_tokens=1, tools=[{"name": "lake"}])
    with pytest.raises(BadRecord, match=r"tools: the text holds the control token '<\|im_end\|>'"):
        from_messages(TWO_TURNS, made, num_end_tokens=1, tools=[{"name": "lake", "description": f"a{END}"}])


@pytest.mark.parametrize("behind", ["", "\n"], ids=["glued", "lines"])
def test_replies_are_learned_with_their_own_spaces_alone(behind):
    """A tokenizer of SentencePiece's kind puts one before every text. And a later prompt is what a decoder is given."""
    kind = copy.deepcopy(sentencepiece())
    kind.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}(" + "{{ m['content'] }})" + behind
        + "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
    )  # fmt: skip
    said = messages("tee", "a tee", "ten", "un a")
    example = from_messages(said, kind, num_end_tokens=1)
    turns = np.split(example.tokens, np.flatnonzero(np.diff(example.loss_mask.astype(int))) + 1)
    assert [decoder_behind(kind)(turn[:-1].tolist()) for turn in turns[1::2]] == ["a tee", "un a"]
    assert np.concatenate(turns[:3]).tolist() == prompt_of(said, kind)
