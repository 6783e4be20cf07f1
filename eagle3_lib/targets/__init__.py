"""The target model: its folder, prompts and answers, reasoning traces, and what one forward pass of it gives."""
