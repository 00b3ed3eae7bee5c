"""How the shipped model was made: data, tokenizer, model, training loop, export."""
