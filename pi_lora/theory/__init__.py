"""The paper's bounds (section 2) as numbers and figures."""
