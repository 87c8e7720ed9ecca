"""What notebooks show of a function: its verdict and causes, whatever characters are in them."""

import xml.etree.ElementTree

import tensorflow as tf

import coexec

X = tf.constant([1.0, 2.0])


def shown(step):
    """The text that a notebook shows, from HTML that is well-formed."""
    tree = xml.etree.ElementTree.fromstring(f"<div>{step._repr_html_()}</div>")
    return " ".join("".join(tree.itertext()).split())


def test_a_function_shows_its_verdict_causes_and_segments():
    @coexec.function(name="<b>&amp;</b>")
    def step(x):
        if float(tf.reduce_sum(x)) < 1e9 and "<i>":
            x = x * 2.0
        return tf.exp(x)

    assert shown(step) == "coexec.function <b>&amp;</b>: not called yet"
    step(X)
    assert "a call takes a time that is not known yet" in shown(step)
    for _ in range(5):
        step(X)
    text = shown(step)
    assert "<b>&amp;</b>: a call takes " in text
    assert "CX-READ" in text
    assert 'if float(tf.reduce_sum(x)) < 1e9 and "<i>":' in text
    assert "segment 1 of 2: " in text
    assert step._repr_html_() == step._repr_html_()
    assert step.stats().calls == 6


def test_only_the_dearest_causes_are_shown():
    @coexec.function
    def step(x):
        for _ in range(3):
            x = x + float(tf.reduce_sum(x)) * 0.0
        a = float(tf.reduce_sum(x))
        b = float(tf.reduce_sum(tf.exp(x)))
        return x * a * b

    for _ in range(4):
        step(X)
    with coexec.base.tuning.tuned(summary_causes=1):
        html = step._repr_html_()
    assert html.count("<code>CX-") == 1
    left = len(step.explain().as_dict()["causes"]) - 1
    assert left > 0
    assert f"and {left} more" in html


def test_an_explanation_is_shown_as_it_is():
    step = coexec.function(tf.exp, name="a < b")
    step(X)
    text = step.explain()._repr_html_()
    assert text.startswith("<pre>a &lt; b: ")
    assert text.count("\n") == str(step.explain()).count("\n")
