"""How the built-in model mimo-tiny was made: its text, its tokenizer, its architecture, its training."""
