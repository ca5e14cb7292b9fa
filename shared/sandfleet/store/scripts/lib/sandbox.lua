-- What takes a place of its node, and with a user one of theirs, until `score`.
local function take_place(sid, node, user, score)
  call('ZADD', P .. 'places:' .. node, score, sid)
  keep(P .. 'places:' .. node, KEEP)
  if user and user ~= '' then
    call('ZADD', P .. 'user:' .. user, score, sid)
    keep(P .. 'user:' .. user, KEEP)
  end
end

local function free_place(sid, node)
  call('ZREM', P .. 'places:' .. node, sid)
  call('ZREM', P .. 'warm:' .. node, sid)
  call('ZREM', P .. 'stopping:' .. node, sid)
  local user = call('HGET', P .. 'sandbox:' .. sid, 'user')
  if user and user ~= '' then call('ZREM', P .. 'user:' .. user, sid) end
end

-- Remove every trace of a sandbox but its thread (home and epoch stay).
local function forget(sid, route, ms)
  local _, node = split(route)
  free_place(sid, node)
  call('ZREM', P .. 'sandboxes', sid)
  call('DEL', P .. 'sandbox:' .. sid, P .. 'agents:' .. sid, P .. 'busy:' .. sid)
  kick(ms)
end

-- Lost is kept ten minutes so that callers get a clear answer.
local function make_lost(sid, route, ms, reason)
  local _, node = split(route)
  free_place(sid, node)
  call('DEL', P .. 'agents:' .. sid, P .. 'busy:' .. sid)
  call('HSET', P .. 'sandbox:' .. sid, 'state', 'lost', 'used', ms)
  call('PEXPIRE', P .. 'sandbox:' .. sid, 600000)
  story(sid, ms, 'lost', text('reason', reason) .. where(route))
  kick(ms)
end

-- What a thread has: live, creating, stopping, or nil (nothing that serves; the old record may still be there).
local function thread_state(digest, ms)
  local sid = call('HGET', P .. 'thread:' .. digest, 'sandbox_id')
  if not sid then return nil end
  local sb = call('HMGET', P .. 'sandbox:' .. sid, 'owner', 'state', 'route')
  if sb[1] ~= digest then return nil end
  local state, route = sb[2], sb[3]
  local _, node, inc = split(route)
  if state == 'lost' then return nil, sid, route, node end
  local holder = call('GET', P .. 'lease:' .. node)
  if holder ~= inc then
    -- Its node is back and about to say what it still has: to place the thread anew would end what runs there.
    local back = state == 'live' and holder and call('HGET', P .. 'node:' .. node, 'returning') == holder
    if not back then return nil, sid, route, node end
  end
  if state == 'live' then
    local ns = call('HGET', P .. 'node:' .. node, 'state')
    if ns ~= 'ready' and ns ~= 'cordoned' and ns ~= 'away' then state = nil end
  elseif state == 'creating' then
    local until_ms = tonumber(call('ZSCORE', P .. 'places:' .. node, sid) or 0)
    if until_ms <= ms then state = nil end
  end
  return state, sid, route, node
end
