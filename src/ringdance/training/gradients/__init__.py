"""Exchange the gradients of a step between ranks: buckets, masks, sparse rows, compression."""
