"""What a model remembers between steps: schema, pages, prefix index and the tensors behind them.

`schema` (with `rules`) is what a model declares; `budget` says how many pages fit; `pages` and
`prefix` are plain Python and say who holds them; `tensors` owns the device memory.
"""
