"""The keys around the model, as closed pydantic blocks."""
