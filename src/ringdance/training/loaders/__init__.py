"""Load images and table rows that are divided among ranks, and measure the input of a job."""
