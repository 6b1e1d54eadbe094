"""The gradients: one kernel whose five products of a block all live in tensor memory."""
