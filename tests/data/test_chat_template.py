"""Variables of a chat template: as defaults in the template itself, for one conversation, or refused where they do nothing."""

import json

import pytest

from tests.data.test_chat import ASSISTANT, END, QWEN3_STYLE, USER, messages, of_style
from tests.data.tiny import config_of, tokenizer, write_lines
from wedlm_jax.data.chat import from_messages, prompt_of
from wedlm_jax.data.chat_template import read_variables, with_defaults
from wedlm_jax.data.documents import Documents
from wedlm_jax.data.records import BadRecord
from wedlm_jax.data.tokenizer import load_tokenizer, save_tokenizer
from wedlm_jax.errors import UserError

CONVERSATION = messages("the cat", "sat")
NO_THOUGHT = "<think>\n\n</think>\n\n"
# In a macro and a loop, and with white space that depends on what stands before it.
EVERYWHERE = """  {% if mood is defined %}
{%- macro say(m) %}{{ m.content }}{{ mood }}{% endmacro %}
{% for m in messages %}{{ say(m) }}{{ mood }}{% endfor %}
{% endif %}"""


def rendered(made, **variables):
    return made.apply_chat_template(CONVERSATION[:1], tokenize=False, add_generation_prompt=True, **variables)


@pytest.mark.parametrize(
    "value", [False, None, 3, -2.5, "cold\n'wind' \"%} {{ é 🙂", [1, [None, True]], {"a b": {"c": "d"}}]
)
def test_a_default_writes_what_its_caller_would_have_it_write(value):
    made = of_style("{{ mood | tojson }}" + EVERYWHERE)
    assert rendered(with_defaults(made, {"mood": value}, "here")) == rendered(made, mood=value)


def test_what_the_caller_sets_goes_before_a_default_and_a_later_default_before_an_earlier(tmp_path):
    """Also where the template was saved and read."""
    made = with_defaults(of_style(QWEN3_STYLE), {"enable_thinking": False}, "here")
    save_tokenizer(made, tmp_path)
    for one in (made, load_tokenizer(tmp_path)):
        assert rendered(one) == f"{USER}the cat{END}\n{ASSISTANT}{NO_THOUGHT}"
        assert rendered(one, enable_thinking=True) == f"{USER}the cat{END}\n{ASSISTANT}"
        assert rendered(with_defaults(one, {"enable_thinking": True}, "here")) == f"{USER}the cat{END}\n{ASSISTANT}"


def test_of_several_templates_each_has_the_default():
    made = of_style({"default": QWEN3_STYLE, "tool_use": "tools:" + QWEN3_STYLE})
    made = with_defaults(made, {"enable_thinking": False}, "here")
    for tools, start in ((None, USER), ([{"name": "look"}], "tools:" + USER)):
        assert rendered(made, tools=tools) == f"{start}the cat{END}\n{ASSISTANT}{NO_THOUGHT}"


def test_none_and_those_that_it_has_leave_the_tokenizer_as_it_is():
    bare = of_style(None)
    assert with_defaults(tokenizer(), {}, "here") is tokenizer() and with_defaults(bare, {}, "here") is bare
    made = with_defaults(of_style(QWEN3_STYLE), {"enable_thinking": False}, "here")
    assert with_defaults(made, {"enable_thinking": False}, "here") is made


@pytest.mark.parametrize(
    ("template", "variables", "message"),
    [
        (QWEN3_STYLE, {"enable_thinkng": False}, "here: the tokenizer's chat template reads no 'enable_thinkng'"),
        (QWEN3_STYLE, {"enable": 1}, "here: the tokenizer's chat template reads no 'enable'"),
        (QWEN3_STYLE, {"a b": 1}, "here: the tokenizer's chat template reads no 'a b'"),
        (QWEN3_STYLE, {"messages": []}, "here: messages is given to every chat template and cannot be set"),
        (QWEN3_STYLE, {"eos_token": "x"}, "here: eos_token is given to every chat template and cannot be set"),
        (QWEN3_STYLE, {"chat_template": "x"}, "here: chat_template is given to every chat template and cannot be set"),
        (None, {"enable_thinking": False}, "here: the tokenizer has no chat template"),
    ],
)
def test_one_that_would_do_nothing_is_refused(template, variables, message):
    with pytest.raises(UserError) as caught:
        with_defaults(of_style(template), variables, "here")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("enable_thinking=false", "no JSON"),
        ("[1]", "must be an object"),
        ('{"a": NaN}', "no JSON (NaN is no value of JSON)"),
    ],
)
def test_what_is_no_object_of_json_is_told(text, message):
    with pytest.raises(UserError) as caught:
        read_variables(text, "here")
    assert str(caught.value).startswith(f"here={text!r}: {message}")


def test_a_conversation_is_learned_and_asked_with_its_own():
    made, own = of_style(QWEN3_STYLE), {"enable_thinking": False}
    example = from_messages(CONVERSATION, made, num_end_tokens=1, variables=own)
    prompt = prompt_of(CONVERSATION, made, variables=own)
    assert made.decode(prompt) == f"{USER}the cat{END}\n{ASSISTANT}{NO_THOUGHT}"
    assert example.tokens[~example.loss_mask].tolist() == prompt
    assert made.decode(example.tokens[example.loss_mask]) == f"sat{END}"
    for wrong in ({"tools": []}, {"mood": 1}):
        with pytest.raises(BadRecord, match="chat_template_kwargs: "):
            from_messages(CONVERSATION, made, num_end_tokens=1, variables=wrong)
    with pytest.raises(BadRecord, match=r"enable_thinking: the text holds the control token '<\|im_end\|>'"):
        from_messages(CONVERSATION, made, num_end_tokens=1, variables={"enable_thinking": END})


def test_a_record_brings_its_own_before_those_of_the_data(tmp_path):
    """Null is a variable that a row of a table does not set."""
    records = [{"messages": CONVERSATION, "chat_template_kwargs": own} for own in (None, {"enable_thinking": None})]
    records += [{"messages": CONVERSATION, "chat_template_kwargs": {"enable_thinking": own}} for own in (True, False)]
    file = write_lines(tmp_path / "chat.jsonl", [*records, {"messages": CONVERSATION, "chat_template_kwargs": [1]}])
    counts = []
    for of_all in (None, json.dumps({"enable_thinking": False})):
        config = config_of(file, chat_template_kwargs=of_all, on_bad_record="skip", num_end_tokens=1)
        documents = Documents(config, of_style(QWEN3_STYLE), 0, "train")
        found = [documents[i] for i in range(5)]
        (bad,) = (document.skipped for document in found if document.skipped)
        assert bad.endswith("chat_template_kwargs is list, not an object")
        learned = [d.examples[0].tokens[d.examples[0].loss_mask] for d in found if d.examples]
        counts.append(sum(tokenizer().decode(ids) == f"sat{END}" for ids in learned))
    assert counts == [1, 3]
