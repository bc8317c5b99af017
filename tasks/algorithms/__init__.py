"""Pure algorithms of offline RLHF: small functions of tensors and numbers, on torch and numpy.

Conventions that hold in every module:

- Tensors of token values are padded ``(B, T)``: B sequences, T response tokens. A mask is bool,
  True = a real token.
- What lies under a False mask never matters, be it NaN or infinity, neither for a value nor for a
  gradient.
- Work is done in fp32, whatever the dtype that comes in.
- A loss divides by counts of the whole optimiser step, handed in by the caller, so the sum over
  micro-batches and ranks is the loss of the whole batch. Metrics whose name ends in ``_sum``, and
  counts ``n_*``, add up in the same way.
"""
