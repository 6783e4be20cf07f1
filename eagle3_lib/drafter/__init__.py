"""The drafter: the one model that training, replay and export run, and the formats that it is read from and written to."""
