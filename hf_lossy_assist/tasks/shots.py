"""Eight worked word problems of our own, for few-shot prompts: (question, reasoning, answer)."""

SHOTS: tuple[tuple[str, str, str], ...] = (
    (
        "A bakery fills 6 trays with 12 rolls each. By noon 45 rolls are sold. How many rolls are left?",
        "Six trays of 12 rolls are 6 * 12 = 72 rolls. After 45 are sold, 72 - 45 = 27 remain.",
        "27",
    ),
    (
        "Nora rides 14 km to work and the same way back, on 4 days a week. How many kilometres does she ride in 3 weeks?",
        "One day is 14 + 14 = 28 km. A week has 4 such days, so 4 * 28 = 112 km. Three weeks make 3 * 112 = 336 km.",
        "336",
    ),
    (
        "A kettle costs $40 and is sold at 15% off. Omar pays with a $50 note. How much change does he get, in dollars?",
        "The discount is 0.15 * 40 = 6 dollars, so the kettle costs 40 - 6 = 34 dollars. The change is 50 - 34 = 16.",
        "16",
    ),
    (
        "Three friends share the rent of $1,260 in such a way that Lena pays twice as much as each of the other two. "
        "How much does Lena pay?",
        "Lena's part counts as two and the others' as one each, which makes 2 + 1 + 1 = 4 parts. One part is "
        "1260 / 4 = 315 dollars, and Lena pays 2 * 315 = 630.",
        "630",
    ),
    (
        "A tank holds 200 litres and is three quarters full. A pump takes out 9 litres a minute. How many litres are in the "
        "tank after 8 minutes?",
        "At first there are 200 * 3 / 4 = 150 litres. The pump takes 8 * 9 = 72 litres. That leaves 150 - 72 = 78.",
        "78",
    ),
    (
        "Pavel reads 24 pages on Monday, half as many on Tuesday, and on Wednesday as many as on both days before. "
        "How many pages has he read?",
        "On Tuesday he reads 24 / 2 = 12 pages. Monday and Tuesday make 24 + 12 = 36, and Wednesday is 36 again. "
        "In all that is 36 + 36 = 72.",
        "72",
    ),
    (
        "A school orders 9 boxes of chalk with 16 sticks each. Each of its 12 rooms gets the same number of sticks. "
        "How many sticks does one room get?",
        "Nine boxes hold 9 * 16 = 144 sticks. For 12 rooms that is 144 / 12 = 12 sticks each.",
        "12",
    ),
    (
        "Rita is 7 years older than Sam. In 5 years she will be twice as old as he. How old is Sam now?",
        "Let Sam be s years old, so Rita is s + 7. In five years, s + 7 + 5 = 2 * (s + 5), which is s + 12 = 2s + 10. "
        "So s = 12 - 10 = 2.",
        "2",
    ),
)
