"""The rules of checked mode, operator by operator; gnomon.attention.checked puts them to work.

Each rule looks at one call of one kernel: its arguments before, its results after. Rules know
nothing of engines; the row of a call is turned into a row of the step, and into a request, by the
inspector that runs them.
"""
