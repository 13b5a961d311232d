"""Exchange tensors through torch.distributed: NCCL for GPU tensors, gloo for CPU tensors.

The ranks agree as usual on what to exchange, and in which order. The data of an agreed batch is exchanged
through a communicator. Each process set has its own communicator, which is created at its first use with the
help of the engine.

Note [Streams]
The thread that submits tensors records an event after the work that computes them. The exchange has its own
stream. This stream waits for the event, copies the batch into one flat tensor, exchanges it and records an
event. The stream that uses the results waits for that event. The host does not wait, so a work is done once
its exchange has been enqueued. torch's allocator is informed about memory that is allocated on one
stream and used on another (``record_stream``). CPU tensors have no stream, so the engine polls gloo.
"""
