"""What is taken from a text as its answer."""

import pytest

from wedlm_jax.evals.scoring import behind_thinking, choice, formula, number, one_form, only_formula, only_number, whole


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("6 + 7 = 13.\n#### 13", "13"),
        ("#### 18\n\nQuestion: next\n#### 7", "18"),
        ("The answer is 18.\n####", "18"),
        ("#### The result is 2 * 9 = 18", "18"),
        ("####18", "18"),
        ("#### 1. First step\n2 * 9 = 18\n#### 2) The end\n#### 3: Or not\n#### 18.", "18"),  # headings of a chat model
        ("#### 1. First step\nShe has 18.", "18"),
        ("She has 12 eggs, so she sells them for $1,200.50.", "1200.5"),
        ("The field measures 1{,}200 m^2, at 3 kg m^{-2}.", "3"),
        ("an area of $1{,}200\\text{ cm}^2$", "1200"),
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
        ("#### **18** eggs, of 20", "18"),
        (r"#### \$18 of 20", "18"),
        (r"#### \boxed{18} of 20", "18"),
        (r"so \boxed{2}, no: $\boxed{18\text{ eggs}}$ of 20", "18"),
        (r"\boxed{many} of 20", "20"),
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
        ("The answer is A and not B", "A"),
        ("**Answer:** B\n\nC is too high", "B"),
        ("**Answer**: **B**\n\nC is too high", "B"),
        (r"The answer is \(\boxed{B}\), not C", "B"),
        (r"The answer is $\boxed{\mathbf{B}}$, not C", "B"),
        (r"The correct answer is \textbf{(B)}, not C", "B"),
        ("The answer is: ( B ), not C", "B"),
        ("Answer: A triangle has three sides, so C", "C"),
        ("Let's think. A car moves, and I'd say so does B", "B"),
        ("The answer is (b).", "B"),
        ("(c) 5 apples", "C"),
        ("Both (a) and (B) are wrong, so it is **[d]**", "D"),
        ("Option A: too low.\nOption B: too high.\nThe answer is option C, not B.", "C"),
        ("Option A is too low, option B too high. The correct option is C, not B.", "C"),
        ("Answer choice A is too low. The correct answer is choice D, not C.", "D"),
        ("Option A weighs 3 and option B weighs 4, so it is (B)", "B"),
        ("I take option C, for A and B are wrong", "C"),
        ("The answer is 'B', not 'C'", "B"),
        ("The answer is \N{LEFT DOUBLE QUOTATION MARK}B\N{RIGHT DOUBLE QUOTATION MARK}, not A", "B"),
        ("The answer is B's", None),
        ("The answer is $B$, not A", "B"),
        (r"The answer is $\boxed{\text{B}}$, not A", "B"),
        ("f(b) is 5 and (i) holds", None),
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
    assert only_number(rf"{text}, so \boxed{{4}}") == "4" and only_number(rf"4 or \boxed{{{text}}}") is None


@pytest.mark.parametrize(
    ("written", "form"),
    [
        ((r"\dfrac12", r"\frac{1}{2}", "1/2", r"$\tfrac 12$", r"x = \frac1{2}", r"\frac{1}2."), "1/2"),
        ((r"-\frac{3}{4}", r"\dfrac{-3}{4}", "-3/4", "\N{MINUS SIGN}3/4"), "-3/4"),
        ((r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}2)"), r"(3,\frac{\pi}{2})"),
        ((r"\dfrac{\sqrt 3}{2}", r"\frac{\sqrt{3}}{2}"), r"\frac{\sqrt{3}}{2}"),
        ((r"10\text{ cm}", r"10 \mbox{ inches}^2", r"10^\circ", r"10^{\circ}", r"10\%", r"\$10.00", "10"), "10"),
        ((r"10,\!080", "10,080", "10{,}080"), "10080"),
        ((r"\text{Evelyn}", r"\textbf{Evelyn}", "Evelyn"), "Evelyn"),
        ((r"x^{2} + 1 \leq 5", r"x^2+1\le5"), r"x^2+1\le5"),
        ((r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",), r"\begin{pmatrix}1\\2\end{pmatrix}"),
        ((r"\{1, 2\}", r"\left\{1,2\right\}"), r"\{1,2\}"),
        (("", " ", "$$"), None),
    ],
)
def test_a_formula_is_written_in_one_form(written, form):
    assert {one_form(latex) for latex in written} == {form}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"1\frac{1}{2}", r"\frac{11}{2}"),  # a mixed number
        (r"\frac{1}{2}x", r"\frac{1}{2x}"),
        (r"\frac{-1+x}{2}", r"-\frac{1+x}{2}"),
        ("2/4", "1/2"),
        ("(1,2)", "[1,2]"),
        ("12", "1,2"),
        (r"x^{12}", "x^12"),
        (r"\sqrt{12}", r"\sqrt12"),
        ("x=1", "x=1,x=2"),
    ],
)
def test_formulas_of_other_values_are_not_one(one, other):
    assert one_form(one) != one_form(other)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"First \boxed{2}, no: $\boxed{\frac{1}{\sqrt{3}}}$. Done, with 5 to spare.", r"\frac{1}{\sqrt{3}}"),
        (r"Final Answer: The final answer is $x=7$. I hope it is correct.", "7"),
        (r"The answer is $3$, that is \fbox{4}", "4"),
        (r"so \boxed 5 legs in 3", "5"),
        (r"so \boxed{+5} in 3, in \boxed form", "5"),
        (r"\boxed{f(x)=\left\{ x \right.} and 3", r"f(x)=\{x"),  # braces that are signs need not close
        (r"\boxed{x < 1 \}}", r"x<1\}"),
        (r"the answer is 5", None),
        (r"cut at \boxed{3", None),
        (r"\boxed{}", None),
    ],
)
def test_a_formula_is_what_stands_in_the_last_box_or_is_told_in_dollars(text, found):
    assert formula(text) == found


def test_an_answer_to_score_by_is_a_formula_alone_or_holds_one():
    assert only_formula(r"\frac12") == only_formula("Half of it.\n$\\boxed{1/2}$") == "1/2"
    assert only_formula("Half of it:\n1/2") is None


def test_a_whole_text_is_compared_without_white_space_around_it():
    assert whole(" a b\n") == "a b" and whole("\n") is None


@pytest.mark.parametrize(
    ("completion", "begun", "said"),
    [
        ("<think>\n5 or 6?\n</think>\n\n6", False, "\n\n6"),
        ("5 or 6?\n</think>\n\n6", True, "\n\n6"),
        ("\n<think>\n5, 6", False, ""),  # cut off before it answered
        ("5, 6", True, ""),
        ("6", False, "6"),
    ],
)
def test_thinking_is_no_answer(completion, begun, said):
    assert behind_thinking(completion, begun) == said
