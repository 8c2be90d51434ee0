"""Model families: config.json to a frozen config, weights to layers, a batch to logits.

A model declares its cache as a `CacheSchema`; it never touches pages or cache bytes itself.
"""
