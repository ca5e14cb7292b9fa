-- Every known node.
-- KEYS  1 prefix
-- Returns a list of {node, lease holder or '', places, creating, blanks being started, stopping, warm,
-- {sandbox, warm since ms, …} longest idle first, {digest of each ready blank, …}, inflight, field, value…}
--@use time blanks
local ms = now_ms()
local out = {}

local function being_made(node)
  local creating, starting = 0, 0
  for _, member in ipairs(call('ZRANGEBYSCORE', P .. 'places:' .. node, '(' .. ms, '(+inf')) do
    if is_blank(member) then starting = starting + 1 else creating = creating + 1 end
  end
  return creating, starting
end

for _, node in ipairs(call('SMEMBERS', P .. 'nodes')) do
  local fields = call('HGETALL', P .. 'node:' .. node)
  if #fields == 0 then
    call('SREM', P .. 'nodes', node)
  else
    local creating, starting = being_made(node)
    out[#out + 1] = { node, call('GET', P .. 'lease:' .. node) or '',
      call('ZCOUNT', P .. 'places:' .. node, '(' .. ms, '+inf'), creating, starting,
      call('ZCOUNT', P .. 'stopping:' .. node, '(' .. (ms - 30000), '+inf'), call('ZCARD', P .. 'warm:' .. node),
      call('ZRANGE', P .. 'warm:' .. node, 0, 31, 'WITHSCORES'), call('HVALS', P .. 'blanks:' .. node),
      call('ZCARD', P .. 'inflight:' .. node), unpack(fields) }
  end
end
return out
