"""vLLM: what is known of it (``spec``), and how it is started and spoken to (``server``)."""
