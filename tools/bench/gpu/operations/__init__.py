"""Operations on shapes of served models, each with a check and a lower bound of its time."""
