/* Every native kernel in one translation unit: reading the intrinsics' header takes longer than compiling them. */

#include "parallel.h"
#include "vectors.h"
#include "recording.h"
#include "tiles.h"

#include "../activation/native.c"
#include "../attention/native.c"
#include "../attention/native_chunks.c"
#include "../attention/native_prompts.c"
#include "../heads/native.c"
#include "../linear/native.c"
#include "../linear/panels.c"
#include "../linear/panels_pack.c"
#include "../norm/native.c"
#include "../sums/native.c"
