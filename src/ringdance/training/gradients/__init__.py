"""Gradients of a step, exchanged between ranks: buckets, masks, sparse rows, compression."""
