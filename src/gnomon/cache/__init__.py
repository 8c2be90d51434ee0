"""What a model remembers between steps: schema, pages, prefix index and the tensors behind them.

`pages` and `prefix` are plain Python; `tensors` owns the device memory.
"""
