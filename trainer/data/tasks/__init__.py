"""Training tasks: span corruption, masked and prefix LM, supervised fine-tuning, chat."""
