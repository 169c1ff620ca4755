"""What is taken from a text as its answer."""

import pytest

from wedlm_jax.evals.scoring import choice, number, only_number, whole


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("6 + 7 = 13.\n#### 13", "13"),
        ("#### 18\n\nQuestion: next\n#### 7", "18"),
        ("The answer is 18.\n####", "18"),
        ("#### The result is 2 * 9 = 18", "18"),
        ("####18", "18"),
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
        ("1.5e3", "1500"),
        ("it is .5", "0.5"),
        ("-€5 or \N{EN DASH}5.10", "-5.1"),
        ("\N{ARABIC-INDIC DIGIT THREE}", None),
        ("no number", None),
        ("", None),
    ],
)
def test_a_number_is_the_first_behind_a_mark_or_the_last_one_and_is_written_in_one_form(text, found):
    assert number(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("(C) because D is wrong", "C"),
        ("A good question. I think so. The answer is D.", "D"),
        ("Answer: B\nQuestion: A?", "B"),
        ("B. I chose this answer because it is right.", "B"),
        ("Answer: B\n\nExplanation: this answer is right.", "B"),
        ("The correct choice is D. A, B and C are not answers.", "D"),
        ("The correct answer is (A), since answer (B) ignores friction.", "A"),
        ("**Answer:** J", "J"),
        ("The answer is A because it floats", "A"),
        ("Answer: A triangle has three sides, so C", "C"),
        ("Let's think. A car moves, and I'd say so does B", "B"),
        ("Apples", None),
        ("the answer is apples", None),
        ("", None),
    ],
)
def test_a_choice_is_a_letter_that_is_named_or_begins_the_text_or_stands_alone_last(text, found):
    assert choice(text) == found


@pytest.mark.parametrize("text", ["1/2", "8:30", "2024-01-05", "5 x 10^3", "between 3 and 5", "three"])
def test_an_answer_to_score_by_holds_one_number_or_marks_it(text):
    assert only_number(text) is None and only_number(f"#### {text}") is None
    assert only_number(f"{text}\n#### 4") == only_number("4 eggs") == "4"


def test_a_whole_text_is_compared_without_white_space_around_it():
    assert whole(" a b\n") == "a b" and whole("\n") is None
