"""Passkey retrieval (Mohtashami and Jaggi 2023; paper.tex, section 3.3)."""
