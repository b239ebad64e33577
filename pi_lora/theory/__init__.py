"""The paper's bounds (section 2) as numbers and figures, and the attention scores of real models beside them."""
