"""Evaluations of a model's answers: needles, word problems, sums; in process or over HTTP."""
