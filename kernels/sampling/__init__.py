"""From rows of logits to tokens and what is told of them."""
