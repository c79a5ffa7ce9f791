"""GLIDE heads, which attend to the target's KV."""

from sharesd.drafters.registry import DrafterSpec, HeadSpec, Need, Support

SPEC = DrafterSpec(
    name="glide",
    kind="head",
    order=2,
    help="a trained head drafts token by token, and attends to the target's KV",
    build="sharesd.drafters.glide.drafter:build",
    needs=frozenset({Need.TARGET_KV}),
    supports=frozenset({Support.TREES}),
    heads=(
        HeadSpec(
            layout="glide",
            architecture="LlamaForCausalLMGlide",
            is_public=False,
            build="sharesd.drafters.glide.head:Glide",
            help="train a GLIDE head",
            training={"draft_vocab": 8192, "feature_weight": 0.0},
        ),
    ),
    source="a folder that `sharesd train glide` wrote",
    colour="#AA4499",
)
