"""The model: its shape, its weights, its KV cache and its attention. Knows nothing of requests.

Reading order: ``config``, ``presets``, ``rotary``, ``kv_cache``, ``attention``, ``llama``, and then
how weights get there: ``hub``, ``gguf``, ``safetensors``, ``loader``.

Nothing is imported here, so that ``config`` and ``presets`` stay usable without torch.
"""
