"""Exchange the gradients of a step between ranks: buckets, masks, sparse rows and compression."""
