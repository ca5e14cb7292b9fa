-- Blank sandboxes belong to the current incarnation of their node: zset `places:{node}` "~slot" -> until when it may be
-- started (+inf once ready); hash `blanks:{node}` slot -> digest of the spec, of those that are ready.
local function is_blank(member)
  return string.byte(member) == 126
end

-- The place and all else of one blank; whether it had a place.
local function drop_blank(node, slot)
  call('HDEL', P .. 'blanks:' .. node, slot)
  return call('ZREM', P .. 'places:' .. node, '~' .. slot) == 1
end

-- The incarnation that they belong to has ended.
local function drop_blanks(node)
  for _, member in ipairs(call('ZRANGE', P .. 'places:' .. node, 0, -1)) do
    if is_blank(member) then call('ZREM', P .. 'places:' .. node, member) end
  end
  call('DEL', P .. 'blanks:' .. node)
end

-- The ready blank that a thread gets: one of its spec, else any if it needs the place; the first by name. Or nil.
local function choose_blank(node, digest, any)
  local all = call('HGETALL', P .. 'blanks:' .. node)
  local same, other
  for i = 1, #all, 2 do
    local slot = all[i]
    if not call('ZSCORE', P .. 'places:' .. node, '~' .. slot) then
      -- A node of the version before, which knows of no blanks, cleared its places and left this: it is no room.
      call('HDEL', P .. 'blanks:' .. node, slot)
    elseif all[i + 1] == digest then
      if not same or slot < same then same = slot end
    elseif not other or slot < other then
      other = slot
    end
  end
  return same or (any and other or nil)
end
