"""Operations of the model that are faster as special kernels.

What: an operation is a `torch.library.custom_op` with a plain PyTorch reference, which runs wherever Triton or a GPU
is not, and Triton kernels in a file next to it, which is imported on a GPU only.
Why custom operations: torch.compile, activation checkpointing, tensor parallelism and the FLOP counter see the same
opaque operation whether the kernel or its reference runs. So one graph serves all shapes, and only the operation
decides what is saved for the backward pass.
Price: gradients are written by hand, and there are none of second order.
"""
