"""``ringdance plan``: predict the speed, the time and the price of a job on other machines."""
