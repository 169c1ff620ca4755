"""What is taken from a text as its answer."""

import pytest

from wedlm_jax.evals.scoring import choice, number, whole


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("6 + 7 = 13.\n#### 13", "13"),
        ("#### 5\nor rather\n#### 18 (of 20)", "18"),
        ("She has 12 eggs, so she sells them for $1,200.50.", "1200.5"),
        ("#### -$3", "-3"),
        ("x is \N{MINUS SIGN}4", "-4"),
        ("between 3-5", "5"),
        ("007.00", "7"),
        ("0.5 of it", "0.5"),
        ("-0", "0"),
        ("1.2.3", "1.2"),
        ("12,34", "34"),
        ("9" * 5000, "9" * 5000),
        ("18 apples #### none", None),
        ("no number", None),
        ("", None),
    ],
)
def test_a_number_is_found_behind_the_mark_or_is_the_last_one_and_is_written_in_one_form(text, found):
    assert number(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("B", "B"),
        ("(C) because D is wrong", "C"),
        ("A good question. I think so. The answer is D.", "D"),
        ("Answer: B\nQuestion: A?", "B"),
        ("Apples", None),
        ("the answer is apples", None),
        ("", None),
    ],
)
def test_a_choice_is_a_letter_that_stands_alone_behind_the_word_answer(text, found):
    assert choice(text) == found


def test_a_whole_text_is_compared_without_white_space_around_it():
    assert whole(" a b\n") == "a b" and whole("\n") is None
